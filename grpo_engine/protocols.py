"""The seams between the four modules. `pipeline/` and `stages/` know these and nothing behind them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from grpo_engine.config import SamplingConfig
    from grpo_engine.types import (
        Completion,
        Group,
        Prompt,
        RewardFault,
        RewardPart,
        SampleRequest,
        StepResult,
        TextScore,
        TextVectors,
        TrainRow,
    )


T = TypeVar("T")


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
    """Module 1, rollout: tokens in, tokens and log-probabilities out. Never decodes to encode again."""

    shares_weights: bool
    """True: it reads the learner's own weights, so that an update cannot be lost."""

    def sample(self, requests: Sequence[SampleRequest], sampling: SamplingConfig) -> list[Completion]:
        """One completion a request, in order. Greedy when `sampling.temperature == 0`; log-probabilities are then those
        at temperature 1. Raises NonFinite when the model gives numbers that are not finite."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Take over the policy's full weights, and forget what was cached of the old ones; every later completion
        carries `policy_version`."""
        ...

    def take_metrics(self) -> dict[str, float]:
        """What happened since the last call, by names of the metric catalogue (rollout/…); empty when nothing did."""
        ...

    def close(self) -> None:
        """End processes and free memory; nothing can be sampled afterwards. May be called again."""
        ...


@runtime_checkable
class Sleeper(Protocol):
    """A sampler that can give its memory back while the trainer works."""

    def sleep(self) -> None:
        """Nothing is sampled until the next `load_weights`, which wakes it."""
        ...


class Replica(Protocol):
    """One of several copies of the weights."""

    def sample(self, requests: Sequence[SampleRequest], sampling: SamplingConfig) -> list[Completion]:
        """As Sampler.sample, by this copy alone."""
        ...


@runtime_checkable
class Replicated(Protocol):
    """A sampler that spreads its requests over copies, each of which may miss an update."""

    def replicas(self) -> Sequence[Replica]:
        """Those that would get requests now."""
        ...


class Scorer(Protocol):
    """Module 2, inference: log-probabilities of given completions by a frozen model."""

    def score(self, rows: Sequence[TrainRow], temperature: float) -> list[list[float]]:
        """[T] float32 nats for each row's completion tokens, full distribution."""
        ...


class TextScorer(Protocol):
    """Module 2, inference: one score for each answer, by a frozen reward model."""

    version: str
    """Hash of the model's files."""

    def scores(self, pairs: Sequence[tuple[str, str]]) -> list[TextScore]:
        """Of (question, answer) pairs, in order; none depends on the others."""
        ...


class TextEncoder(Protocol):
    """Module 2, inference: texts as vectors, by a frozen encoder."""

    version: str
    """Hash of the model's files."""

    def embed(self, texts: Sequence[str]) -> list[TextVectors]:
        """In order; none depends on the others."""
        ...


class RewardFunction(Protocol):
    """Module 3, reward: one part of the reward."""

    name: str
    weight: float
    version: str

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[RewardPart]:
        """One part a completion; a completion it cannot judge gets value None."""
        ...


class Rewards(Protocol):
    """The reward of a stage: all its parts together."""

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[list[RewardPart]]:
        """The parts of each completion, in order."""
        ...

    def combine(self, groups: Sequence[Group]) -> list[Group]:
        """Groups with rewards made of their parts. Give it the whole batch, from all ranks: parts may be normalised
        across groups. A pure function of it."""
        ...

    def take_counts(self) -> dict[str, float]:
        """What happened since the last call, by name in the metric catalogue; counts, so they add up over ranks."""
        ...

    def take_faults(self) -> list[RewardFault]:
        """What could not be judged since the last call, and why."""
        ...


class ValueScorer(Protocol):
    """Module 2, inference: the critic's values of given completions."""

    def values(self, rows: Sequence[TrainRow]) -> list[list[float]]:
        """[T] for each row: value before each completion token (from the hidden state that predicts it)."""
        ...


class Communicator(Protocol):
    """The ranks of one engine. Every method but the properties is collective: all ranks call it in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def gather(self, value: T) -> list[T]:
        """Every rank's value on every rank, in rank order."""
        ...

    def from_first(self, value: T) -> T:
        """Rank 0's value on every rank."""
        ...

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Add up each tensor over the ranks, in place, in its own type; the same bits on every rank."""
        ...

    def max_(self, tensor: Tensor) -> None:
        """Elementwise maximum over the ranks, in place."""
        ...


class Learner(Protocol):
    """Module 4, training: gradients and optimizer. Clipping and the non-finite guard live here.

    Each rank calls `prepare` and `accumulate` with its own rows, as often as it likes; `prepare` and `step` are
    collective."""

    policy_version: int

    def prepare(self, batch: Sequence[TrainRow]) -> list[TrainRow]:
        """Once a batch, before its first update: rows with old log-probabilities and the entropy mask filled in where
        the objective or the number of updates needs them. Same rows, same order."""
        ...

    def accumulate(self, batch: Sequence[TrainRow], global_denominator: float) -> None:
        """Add the batch's gradient, packed into micro-batches; the loss sum is divided by `global_denominator`."""
        ...

    def step(self) -> StepResult:
        """Sum over ranks, clip, guard, apply, raise `policy_version`, clear gradients."""
        ...

    def iter_full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter of the policy, full shape, adapters merged into copies (collective)."""
        ...

    def save(self, folder: Path) -> None:
        """Write float32 masters or adapter, optimizer and counters into `folder` (safetensors, JSON; no pickle)."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, bit for bit."""
        ...

    def roll_back(self, folder: Path, rate_factor: float) -> None:
        """Weights and optimizer as `save` wrote them; counters stay; the learning rate is scaled from now on."""
        ...

    def take_notices(self) -> list[str]:
        """What happened since the last call that people should know, such as a learned memory limit."""
        ...
