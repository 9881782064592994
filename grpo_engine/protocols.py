"""The seams between the four modules. `pipeline/` and `stages/` know these and nothing behind them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from grpo_engine.config import SamplingConfig
    from grpo_engine.types import Completion, Prompt, RewardPart, SampleRequest, StepResult, TrainRow


class PromptSource(Protocol):
    """An endless, reproducible order of prompts: the same seed and position give the same prompt for ever."""

    size: int | None
    """Rows in one epoch; None when the source is procedural."""

    def take(self, position: int, count: int) -> list[Prompt]:
        """Prompts at positions [position, position + count)."""
        ...

    def held_out(self, count: int) -> list[Prompt]:
        """The first `count` prompts of the held-out part, never returned by `take`."""
        ...


class Sampler(Protocol):
    """Module 1, rollout: tokens in, tokens and log-probabilities out."""

    def sample(self, requests: Sequence[SampleRequest], sampling: SamplingConfig) -> list[Completion]:
        """One completion a request, in order. Greedy when `sampling.temperature == 0`."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Take over the policy's full weights; every later completion carries `policy_version`."""
        ...


class Scorer(Protocol):
    """Module 2, inference: log-probabilities of given completions by a frozen model."""

    def score(self, rows: Sequence[TrainRow], temperature: float) -> list[list[float]]:
        """[T] float32 nats for each row's completion tokens, full distribution."""
        ...


class RewardFunction(Protocol):
    """Module 3, reward: one part of the reward."""

    name: str
    weight: float
    version: str

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[RewardPart]:
        """One part a completion; a completion it cannot judge gets value None."""
        ...


class Learner(Protocol):
    """Module 4, training: gradients and optimizer. Clipping and the non-finite guard live here."""

    policy_version: int

    def accumulate(self, batch: Sequence[TrainRow], global_denominator: float) -> dict[str, float]:
        """Add the batch's gradient, split into micro-batches; the loss sum is divided by `global_denominator`.

        Returns token-weighted means of what was seen (`loss`, `policy/entropy`, `policy/kl`, ...)."""
        ...

    def step(self) -> StepResult:
        """Clip, guard, apply, raise `policy_version`, clear gradients."""
        ...

    def iter_full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter of the policy, full shape (collective)."""
        ...

    def save(self, folder: Path) -> None:
        """Write float32 masters, optimizer and schedule into `folder` (safetensors and JSON, no pickle)."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, bit for bit."""
        ...
