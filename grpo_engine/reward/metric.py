"""What every rule-based metric is: a pure judgement of one completion, made into a reward function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from grpo_engine.types import Completion, Prompt, RewardFault, RewardPart


class Judgement(NamedTuple):
    """One metric's opinion of one completion."""

    value: float | None
    """In [0, 1]; None = abstained: left out of mean and weights, counted, never treated as 0."""
    explanation: str
    """Sentences for the page: what was judged and why it got this value."""
    span: tuple[int, int] | None = None
    """Character range of `Completion.text` that was judged."""


Judge = Callable[[Prompt, Completion], Judgement]
QuickJudge = Callable[[Prompt, Completion], Judgement | None]
"""None: this completion needs the judge itself."""


@dataclass
class Metric:
    """A judge as a reward function: pure, torch-free, one completion at a time."""

    name: str
    weight: float
    version: str
    judge: Judge
    slow: bool = False
    """Takes libraries that may hang or take long (math-verify, sympy): scored in processes that can be killed."""
    quick: QuickJudge | None = None
    """Of a slow metric: decides at once, without libraries, what it can."""
    time_limit_s: float = 5.0
    """Processor seconds for one completion in such a process, or pool.WALL_FACTOR times as many by the clock."""
    unjudged_value: float | None = None
    """Value where the judge ran over its limit or ended its process; None = abstain."""
    prepare: Callable[[], object] | None = None
    """Loads what the judge needs; such a process calls it before the first completion's time runs."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """What its module's `metric` takes beside the config, as JSON, so that such a process can make it again."""

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[RewardPart]:
        return [self._part(self.judge(*pair)) for pair in zip(prompts, completions, strict=True)]

    def _part(self, said: Judgement) -> RewardPart:
        return RewardPart(self.name, said.value, self.weight, said.explanation, said.span, self.version)


@runtime_checkable
class Informed(Protocol):
    """A reward function whose value depends on the part that gates it: it is told of that part, not zeroed by it."""

    def score_given(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], gates: Sequence[float | None]
    ) -> list[RewardPart]:
        """As `score`; `gates[i]` is the gating part's value of completion i, None where that part abstained."""
        ...


# ---------------------------------------------------------------- what a reward function may offer besides
@runtime_checkable
class Counting(Protocol):
    def take_counts(self) -> dict[str, float]:
        """What happened since the last call, by name in the metric catalogue, such as {"reward/late": 3.0}."""
        ...


@runtime_checkable
class Failing(Protocol):
    def take_faults(self) -> list[RewardFault]:
        """Why it could not judge since the last call."""
        ...


@runtime_checkable
class Closing(Protocol):
    def close(self) -> None:
        """End its processes; nothing is scored afterwards."""
        ...
