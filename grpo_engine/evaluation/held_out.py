"""Greedy and sampled accuracy on held-out prompts, the same prompts and random streams each time.

Each rank samples and judges its own part of the prompts; every rank then knows the whole result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo_engine.config import SamplingConfig
from grpo_engine.errors import NonFinite
from grpo_engine.protocols import Communicator, Sampler
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
    communicator: Communicator

    def run(self, sampler: Sampler) -> dict[str, float]:
        """accuracy_greedy, accuracy_sampled in [0, 1]; mean_length_tokens of the greedy completions. Collective.

        Raises NonFinite, on every rank, when the model gives any rank numbers that are not finite."""
        greedy_sampling = self.sampling.model_copy(update={"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0})
        right_greedy, lengths = self._judged(sampler, greedy_sampling)
        right_sampled, _ = self._judged(sampler, self.sampling)
        return {
            "accuracy_greedy": _mean(right_greedy),
            "accuracy_sampled": _mean(right_sampled),
            "mean_length_tokens": _mean(lengths),
        }

    def _judged(self, sampler: Sampler, sampling: SamplingConfig) -> tuple[list[float], list[float]]:
        """Verdict and length of every prompt's completion, over all ranks; their order does not matter."""
        try:
            mine, fault = self._own_share(sampler, sampling), None
        except NonFinite as error:
            mine, fault = ([], []), str(error)
        gathered = self.communicator.gather((*mine, fault))
        if fault := next((fault for *_, fault in gathered if fault is not None), None):
            raise NonFinite(fault)
        return [v for verdicts, *_ in gathered for v in verdicts], [n for _, lengths, _ in gathered for n in lengths]

    def _own_share(self, sampler: Sampler, sampling: SamplingConfig) -> tuple[list[float], list[float]]:
        mine = range(self.communicator.rank, len(self.prompts), self.communicator.world_size)
        prompts = [self.prompts[index] for index in mine]
        requests = [
            SampleRequest(prompt.token_ids, (self.seed, EVALUATION_STREAM, index), f"evaluation-{index}")
            for index, prompt in zip(mine, prompts, strict=True)
        ]
        if not requests:  # more ranks than prompts
            return [], []
        completions = sampler.sample(requests, sampling)
        return self.judge(prompts, completions), [float(len(completion.token_ids)) for completion in completions]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
