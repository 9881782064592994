"""What every rule-based metric is: a pure judgement of one completion, made into a reward function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from grpo_engine.types import Completion, Prompt, RewardPart


class Judgement(NamedTuple):
    """One metric's opinion of one completion."""

    value: float | None
    """In [0, 1]; None = abstained: left out of mean and weights, counted, never treated as 0."""
    explanation: str
    """Sentences for the page: what was judged and why it got this value."""
    span: tuple[int, int] | None = None
    """Character range of `Completion.text` that was judged."""


Judge = Callable[[Prompt, Completion], Judgement]


@dataclass
class Metric:
    """A judge as a reward function: pure, torch-free, one completion at a time."""

    name: str
    weight: float
    version: str
    judge: Judge
    slow: bool = False
    """Takes libraries that may hang or take long (math-verify, sympy): scored in processes that can be killed."""

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[RewardPart]:
        return [self._part(self.judge(*pair)) for pair in zip(prompts, completions, strict=True)]

    def _part(self, said: Judgement) -> RewardPart:
        return RewardPart(self.name, said.value, self.weight, said.explanation, said.span, self.version)
