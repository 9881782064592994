"""Stages of a run: supervised fine-tuning and reinforcement learning, and what both are made of. Torch-free."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from grpo_engine.config_base import Config, check_range
from grpo_engine.config_gates import check_gates
from grpo_engine.config_rewards import RewardConfig
from grpo_engine.config_sources import DataConfig
from grpo_engine.config_training import (
    AdvantageConfig,
    AuxiliaryConfig,
    ClipLoss,
    CorrectionConfig,
    EntropyConfig,
    GRPOAdvantage,
    GuardsConfig,
    KLConfig,
    LossConfig,
    MemoryConfig,
    OptimizerConfig,
)

MAX_STEPS = 10_000_000
"""Of a stage; what databases store as a step count."""


# ---------------------------------------------------------------- shared parts of stages
class SamplingConfig(Config):
    temperature: float = Field(1.0, ge=0, le=5)
    """Softmax temperature; 0 = greedy (evaluation only)."""
    top_k: int = Field(0, ge=0)
    """Keep the k likeliest tokens; 0 = all. R1 samples with 4."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the smallest set of tokens with this mass; 1 = all."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Keep tokens at least this share as likely as the likeliest; 0 = all."""
    max_new_tokens: int = Field(256, ge=1)
    """Longest completion, end token included."""
    stop: list[Annotated[str, Field(min_length=1, max_length=200)]] = Field(
        default_factory=list, max_length=16, json_schema_extra={"format": "lines"}
    )
    """A completion also ends with the token that completes one of these texts, which it keeps."""

    @property
    def truncated(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class CheckpointConfig(Config):
    every_steps: int = Field(50, ge=1)
    """Steps between checkpoints; the last step of a stage is always kept."""
    keep_last: int = Field(3, ge=1)
    """Newest checkpoints kept in a stage, beside the last good one and the best one."""


class EvaluationConfig(Config):
    every_steps: int = Field(10, ge=1)
    """Steps between evaluations on held-out prompts; also before the first and after the last step."""
    num_prompts: int = Field(256, ge=1)
    """Held-out prompts, the same ones each time."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Longest completion in evaluation; None = as in training."""


class EarlyStoppingConfig(Config):
    mode: Literal["off", "observe", "stop"] = "observe"
    """observe shows what it would do; stop ends the run. The operator can change it while the run goes on."""
    rule: Literal["literal", "plateau"] = "literal"
    """literal: improvement of the smoothed reward over 5 steps (from the R1 report);
    plateau: upper confidence bound of a robust trend over a longer window."""
    warmup_steps: int = Field(20, ge=0)
    """Steps before the rule is armed."""
    patience: int = Field(1, ge=1)
    """Consecutive steps that must say stop; 1 is the literal rule."""
    min_improvement: float = Field(0.001, ge=0)
    """Relative improvement below which a step counts against patience."""
    window_steps: int = Field(40, ge=10)
    """Steps of the plateau rule's trend."""
    confidence: float = Field(0.95, gt=0.5, lt=1)
    """Confidence of the plateau rule's upper bound."""


class DetectorsConfig(Config):
    zero_variance_share: float = Field(0.75, gt=0, le=1)
    """Finding when at least this share of groups has no reward variance …"""
    zero_variance_steps: int = Field(5, ge=1)
    """… in this many consecutive steps."""
    entropy_floor_share: float = Field(0.05, gt=0, lt=1)
    """Finding when entropy falls below this share of its first value …"""
    entropy_floor_nats: float = Field(0.01, gt=0)
    """… and below this absolute value, in nats."""
    truncated_share: float = Field(0.5, gt=0, le=1)
    """Finding when at least this share of completions is cut by the token limit …"""
    truncated_steps: int = Field(3, ge=1)
    """… in this many consecutive steps."""
    flat_reward_steps: int = Field(30, ge=5)
    """Finding when the mean reward has no upward trend over this many steps …"""
    flat_reward_ceiling: float = Field(0.9, gt=0, le=1)
    """… while it is below this share of the highest reward the parts can give."""


# ---------------------------------------------------------------- stages
class SFTStage(Config):
    """Supervised fine-tuning on demonstrations (cold start)."""

    kind: Literal["sft"] = "sft"
    data: DataConfig
    num_steps: int = Field(500, ge=1, le=MAX_STEPS)
    """Optimizer steps."""
    rows_per_step: int = Field(64, ge=1)
    """Demonstrations a step."""
    memory: MemoryConfig = MemoryConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig(every_steps=100)


class RLStage(Config):
    """GRPO: sample groups, score, normalise within the group, clipped policy update."""

    kind: Literal["rl"] = "rl"
    data: DataConfig
    rewards: list[RewardConfig] = Field(min_length=1)
    """Parts of the reward: reward = sum of weight x value, values clipped and gated."""
    reward_clip: tuple[float, float] | None = None
    """Lowest and highest reward of a completion, such as 0, 1; None = as the parts give it."""
    num_steps: int = Field(100, ge=1, le=MAX_STEPS)
    """Optimizer steps at most; early stopping may end the stage sooner."""
    prompts_per_step: int = Field(16, ge=1)
    """Prompts sampled for one step (P)."""
    group_size: int = Field(16, ge=2, le=1024)
    """Completions a prompt (G). 16 as in DeepSeek-R1; at least 2, since advantages compare within the group."""
    sampling: SamplingConfig = SamplingConfig()
    advantage: AdvantageConfig = GRPOAdvantage()
    loss: LossConfig = ClipLoss()
    kl: KLConfig = KLConfig()
    entropy: EntropyConfig = EntropyConfig()
    correction: CorrectionConfig = CorrectionConfig()
    auxiliary: AuxiliaryConfig = AuxiliaryConfig()
    old_logprobs: Literal["trainer", "sampler"] = "trainer"
    """What the ratio compares the policy with: its own log-probabilities before the batch's first update, or those of
    the sampler, whose numerical difference then counts as a change of policy."""
    mask_truncated: bool = False
    """Leave completions that ran out of tokens out of the loss, judged by finish reason."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps in which a batch is trained on, each on its own share of the prompts. R1 splits into 16."""
    epochs: int = Field(1, ge=1)
    """Times that a batch is gone through."""
    memory: MemoryConfig = MemoryConfig()
    guards: GuardsConfig = GuardsConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    early_stopping: EarlyStoppingConfig = EarlyStoppingConfig()
    detectors: DetectorsConfig = DetectorsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="after")
    def _training_needs_sampling(self) -> RLStage:
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature 0 gives G equal completions; training needs a temperature above 0")
        if any(r.kind == "gym" for r in self.rewards) and self.data.source != "reasoning_gym":
            raise ValueError(f"the gym reward needs data.source reasoning_gym, not {self.data.source}")
        return self

    @model_validator(mode="after")
    def _rewards_fit(self) -> RLStage:
        check_range("reward_clip", self.reward_clip)
        check_gates(self.rewards)
        return self

    @model_validator(mode="after")
    def _parts_fit(self) -> RLStage:
        if self.minibatches > self.prompts_per_step:
            raise ValueError(f"minibatches {self.minibatches} must not exceed prompts_per_step {self.prompts_per_step}")
        if self.num_steps % self.steps_per_batch:
            raise ValueError(
                f"num_steps {self.num_steps} must be a multiple of minibatches x epochs = {self.steps_per_batch}"
            )
        if self.correction.kind != "none" and self.old_logprobs == "sampler":
            raise ValueError("correction counts the sampler's difference a second time; set old_logprobs to trainer")
        return self

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps that train on one batch of rollouts."""
        return self.minibatches * self.epochs

    @property
    def wants_reference(self) -> bool:
        return self.kl.weight > 0 or self.kl.track


StageConfig = Annotated[SFTStage | RLStage, Field(discriminator="kind")]
