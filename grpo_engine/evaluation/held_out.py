"""Greedy and sampled accuracy on held-out prompts, the same prompts and random streams each time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo_engine.config import SamplingConfig
from grpo_engine.protocols import Sampler
from grpo_engine.types import Completion, Prompt, SampleRequest

EVALUATION_STREAM = 1 << 20
"""Keeps evaluation's random streams apart from training's stage indices."""

Judge = Callable[[Sequence[Prompt], Sequence[Completion]], list[float]]
"""1 for a right completion, 0 for a wrong one, in order."""


@dataclass(frozen=True, slots=True)
class HeldOutEvaluation:
    name: str
    """Benchmark, such as `addition held-out`."""
    prompts: list[Prompt]
    judge: Judge
    sampling: SamplingConfig
    """As in training; the greedy pass sets its temperature to 0."""
    seed: int

    def run(self, sampler: Sampler) -> dict[str, float]:
        """accuracy_greedy, accuracy_sampled in [0, 1]; mean_length_tokens of the greedy completions."""
        greedy_sampling = self.sampling.model_copy(update={"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0})
        greedy = self._sample(sampler, greedy_sampling)
        sampled = self._sample(sampler, self.sampling)
        return {
            "accuracy_greedy": _mean(self.judge(self.prompts, greedy)),
            "accuracy_sampled": _mean(self.judge(self.prompts, sampled)),
            "mean_length_tokens": _mean([float(len(completion.token_ids)) for completion in greedy]),
        }

    def _sample(self, sampler: Sampler, sampling: SamplingConfig) -> list[Completion]:
        requests = [
            SampleRequest(prompt.token_ids, (self.seed, EVALUATION_STREAM, index), f"evaluation-{index}")
            for index, prompt in enumerate(self.prompts)
        ]
        return sampler.sample(requests, sampling)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
