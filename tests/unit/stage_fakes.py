"""Stand-ins for what a stage works with: a context that writes nothing, a learner that only counts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from grpo_engine.communicator import SingleRank
from grpo_engine.config import RLStage, RunConfig
from grpo_engine.control import Control, SharedControl
from grpo_engine.events import NoJournal
from grpo_engine.pipeline.synchronous import Batch
from grpo_engine.stages.context import SavedCheckpoint, StageContext
from grpo_engine.stages.guards import Guards
from grpo_engine.stages.reward_watch import RewardWatch
from grpo_engine.types import Completion, Group, Prompt, Rollout, StageProgress, StepResult


class Listening(NoJournal):
    """Keeps what was said."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []

    def append(self, type: str, *, stage: str | None = None, **payload: Any) -> Any:
        self.events.append(super().append(type, stage=stage, **payload))
        return self.events[-1]

    def of(self, type: str) -> list[Any]:
        return [event for event in self.events if event.type == type]


class CountingLearner:
    """Every step is as `results` says, in order, the last one for ever. `calls` keeps what happened."""

    def __init__(self, *results: Any) -> None:
        self.policy_version = 0
        self.calls: list[Any] = []
        self.results = list(results) or [StepResult(True, 0.5, 1e-4, {"loss": 0.1, "policy/kl": 0.01})]

    def prepare(self, batch: Any) -> list[Any]:
        self.calls.append(("prepare", [row.prompt_ids[0] for row in batch]))
        return list(batch)

    def accumulate(self, batch: Any, denominator: float) -> None:
        self.calls.append(("accumulate", [row.prompt_ids[0] for row in batch], denominator))

    def step(self) -> StepResult:
        result = self.results.pop(0) if len(self.results) > 1 else self.results[0]
        if isinstance(result, Exception):
            raise result
        self.policy_version += result.applied
        self.calls.append("step")
        return result

    def roll_back(self, folder: Path, rate_factor: float) -> None:
        self.calls.append(("roll_back", folder.parent.name, rate_factor))

    def iter_full_weights(self) -> Any:
        return iter(())

    def take_notices(self) -> list[str]:
        return []


class VersionedSampler:
    """Tells how often it was asked for metrics."""

    shares_weights = True
    version = -1
    asked = 0

    def take_metrics(self) -> dict[str, float]:
        self.asked += 1
        return {"rollout/draft_gain": float(self.asked)}

    def load_weights(self, weights: Any, policy_version: int) -> None:
        self.version = policy_version


def rl_stage(**changes: Any) -> RLStage:
    settings = {"data": {"source": "addition"}, "rewards": [{"kind": "format"}], "prompts_per_step": 4, "num_steps": 12}
    return RLStage.model_validate(settings | {"group_size": 2} | changes)


def context_of(stage: RLStage, folder: Path) -> StageContext:
    config = RunConfig.model_validate(
        {"name": "test", "model": {"source": "tiny_llama"}, "stages": [stage.model_dump(mode="json")]}
    )
    ranks = SingleRank()

    def save(path: Path, metrics: dict[str, float]) -> SavedCheckpoint:
        return SavedCheckpoint(path, 1, "0")

    return StageContext(
        config, "0-rl", folder, Listening(), SharedControl(Control(), ranks), ranks, StageProgress(0), save,
        lambda protected: [],
    )  # fmt: skip


def parts_of(stage: RLStage, learner: CountingLearner) -> Any:
    guards = Guards(stage.guards, 1.0, RewardWatch(stage.guards.max_reward_drop))
    return SimpleNamespace(learner=learner, sampler=VersionedSampler(), guards=guards, probe=None, lengths=None)


def batch_of(num_groups: int, number: int = 1, ref_logprobs: list[float] | None = None) -> Batch:
    """Groups of two completions with three tokens; the prompt is the group's number."""
    completion = Completion([5, 6, 7], "", "stop", [-1.0] * 3, [-1.0] * 3)
    rollouts = [
        Rollout(completion, [], reward, advantage, ref_logprobs=ref_logprobs)
        for reward, advantage in ((1.0, 0.7), (0.0, -0.7))
    ]
    groups = [Group(f"{number}-{i}", Prompt(str(i), i, "", [i], {}), rollouts) for i in range(num_groups)]
    return Batch(number, groups, num_groups, 0)
