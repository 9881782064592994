"""RunConfig: the one schema of a run. YAML, REST, form, command line and engine all read it. Torch-free.

A field's description is its help text everywhere. Frozen; unknown fields are refused; no field is filled at run time.
Errors become `Problem`s (field, value, message, remedy) through `grpo_engine.config_errors`.
"""

from __future__ import annotations

import hashlib
import json
from typing import Literal

from pydantic import Field, model_validator

from grpo_engine.config_base import Config
from grpo_engine.config_gates import part_names
from grpo_engine.config_rewards import (
    AccuracyReward,
    BertScoreReward,
    CodeExecutionReward,
    CodeQualityReward,
    CustomReward,
    FormatReward,
    GymReward,
    InformationDensityReward,
    InstructionFollowingReward,
    JudgeReward,
    LanguageConsistencyReward,
    LengthReward,
    LogicalConsistencyReward,
    ReadabilityReward,
    RepetitionReward,
    RewardConfig,
    RewardModelReward,
    SandboxConfig,
    StepValidityReward,
)
from grpo_engine.config_rollout import MTPConfig, RolloutConfig, TorchRollout
from grpo_engine.config_sources import (
    AdditionData,
    DataConfig,
    FileData,
    FolderModel,
    ModelConfig,
    ReasoningGymData,
    TinyLlamaModel,
)
from grpo_engine.config_stages import (
    CheckpointConfig,
    DetectorsConfig,
    EarlyStoppingConfig,
    EvaluationConfig,
    RLStage,
    SamplingConfig,
    SFTStage,
    StageConfig,
)
from grpo_engine.config_training import AdapterConfig, NoAdapter, OptimizerConfig

__all__ = [
    "AccuracyReward",
    "AdditionData",
    "BertScoreReward",
    "CheckpointConfig",
    "CodeExecutionReward",
    "CodeQualityReward",
    "Config",
    "CustomReward",
    "DataConfig",
    "DetectorsConfig",
    "EarlyStoppingConfig",
    "EvaluationConfig",
    "FileData",
    "FolderModel",
    "FormatReward",
    "GymReward",
    "InformationDensityReward",
    "InstructionFollowingReward",
    "JudgeReward",
    "LanguageConsistencyReward",
    "LengthReward",
    "LogicalConsistencyReward",
    "ModelConfig",
    "Needs",
    "OptimizerConfig",
    "RLStage",
    "ReadabilityReward",
    "ReasoningGymData",
    "RepetitionReward",
    "RewardConfig",
    "RewardModelReward",
    "RunConfig",
    "SFTStage",
    "SamplingConfig",
    "SandboxConfig",
    "StageConfig",
    "StepValidityReward",
    "TinyLlamaModel",
    "part_names",
]


# ---------------------------------------------------------------- run
class Needs(Config):
    """What a worker must offer."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Kind of device."""
    num_ranks: int = Field(1, ge=1, le=1024)
    """Training processes on one host: one GPU each, on the CPU they share its cores."""
    labels: list[str] = Field(default_factory=list)
    """Labels a worker must carry, such as a100."""


class RunConfig(Config):
    name: str = Field(min_length=1, max_length=200)
    """What people call the run."""
    tags: list[str] = Field(default_factory=list, max_length=50)
    """Free words to find the run by."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of weights, prompt order and sampling."""
    deterministic: bool = False
    """Bit-exact resume on CPU: fixed threads and batch shapes, no timed decisions."""
    num_threads: int | None = Field(None, ge=1, le=256)
    """CPU threads a process may use; None = all cores, divided among the ranks."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type; masters and log-probabilities stay float32."""
    model: ModelConfig
    adapter: AdapterConfig = NoAdapter()
    rollout: RolloutConfig = TorchRollout()
    mtp: MTPConfig = MTPConfig()
    sandbox: SandboxConfig = SandboxConfig()
    self_test: Literal["stop", "warn", "off"] = "stop"
    """Seconds of checks before training: ratios, gradients, sampler, tokens. A failed one ends the run, or warns."""
    stages: list[StageConfig] = Field(min_length=1, max_length=20)
    """Ordered parts of the recipe."""
    needs: Needs = Needs()
    priority: int = Field(0, ge=-1000, le=1000)
    """Queued runs with a higher number start first."""
    max_restarts: int = Field(3, ge=0, le=100)
    """Attempts after the first when a worker is lost."""

    @model_validator(mode="after")
    def _drafts_have_heads(self) -> RunConfig:
        if isinstance(self.rollout, TorchRollout) and self.rollout.drafts.kind == "mtp" and self.mtp.depth == 0:
            raise ValueError("mtp.depth 0 makes no heads, and rollout.drafts.kind mtp drafts with them")
        return self

    def total_steps(self) -> int:
        return sum(stage.num_steps for stage in self.stages)

    def stage_key(self, index: int) -> str:
        """Example: config.stage_key(1) == "1-rl"."""
        return f"{index}-{self.stages[index].kind}"

    def canonical_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    def hash(self) -> str:
        """SHA-256 over the resolved config, hexadecimal; stored with the run and every checkpoint."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()
