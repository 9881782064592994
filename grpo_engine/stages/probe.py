"""The sync probe: does the sampler hold the trainer's weights?

A few fixed prompts are sampled greedily. For every token the sampler's log-probability must be the trainer's, and the
trainer must not find another token clearly likelier. A lost or half update, weights that were put to sleep and came
back old, and key-value caches of an earlier policy all show here (TRL issue 5312, vLLM issue 29341, NeMo-RL issue
4018); an importance weight or a mean over a batch would only drift.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo_engine.config import SamplingConfig
from grpo_engine.config_rollout import ProbeConfig
from grpo_engine.errors import NonFinite
from grpo_engine.model.greedy import GreedyScores
from grpo_engine.pipeline.prompts import take_fitting
from grpo_engine.protocols import PromptSource, Replica, Replicated, Sampler
from grpo_engine.types import SampleRequest, TrainRow

PROBE_STREAM = 1 << 22
"""Keeps the probe's streams apart from those of training, evaluation and self-test; greedy choice draws nothing."""
NUM_PROMPTS = 4
TOLERANCE_NATS = {"float32": 1e-3, "bfloat16": 0.25}
Score = Callable[[Sequence[TrainRow]], list[GreedyScores]]
"""What the trainer says of rows."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Example: ProbeResult(2e-6, 0.0, 64)"""

    gap_nats: float
    """Largest difference of a token's log-probability between sampler and trainer."""
    choice_gap_nats: float
    """Most by which the trainer finds another token likelier than the one that the sampler took; 0 where none is."""
    num_tokens: int

    @property
    def largest_nats(self) -> float:
        return max(self.gap_nats, self.choice_gap_nats)


@dataclass(frozen=True, slots=True)
class SyncProbe:
    prompts: list[list[int]]
    num_tokens: int
    """Sampled for each prompt at most."""
    tolerance_nats: float
    score: Score

    def measure(self, sampler: Sampler) -> ProbeResult:
        """Every copy of the weights that the sampler has is probed; the worst counts.

        Raises NonFinite when the trainer's own numbers are not finite, which is no fault of the update."""
        copies: Sequence[Replica] = sampler.replicas() if isinstance(sampler, Replicated) else [sampler]
        results = [self._measure_one(copy) for copy in copies]
        return max(results, key=lambda result: result.largest_nats)

    def _measure_one(self, copy: Replica) -> ProbeResult:
        requests = [
            SampleRequest(prompt_ids, (PROBE_STREAM, index), f"probe-{index}")
            for index, prompt_ids in enumerate(self.prompts)
        ]
        completions = copy.sample(requests, SamplingConfig(temperature=0.0, max_new_tokens=self.num_tokens))
        rows = [TrainRow(ids, completion.token_ids) for ids, completion in zip(self.prompts, completions, strict=True)]
        gaps: list[float] = []
        choices: list[float] = []
        for scores, completion in zip(self.score(rows), completions, strict=True):
            if not all(map(math.isfinite, scores.chosen)):
                raise NonFinite("the policy's logits are not finite after an update; lower the learning rate")
            gaps += [abs(own - told) for own, told in zip(scores.chosen, completion.logprobs, strict=True)]
            choices += [best - own for own, best in zip(scores.chosen, scores.likeliest, strict=True)]
        return ProbeResult(_largest(gaps), _largest(choices), len(gaps))


def make_probe(
    config: ProbeConfig, source: PromptSource, *, dtype: str, max_context_tokens: int, score: Score
) -> SyncProbe:
    """The source's first prompts, the same on every rank and after every resume."""
    prompts = [prompt.token_ids for prompt in take_fitting(source, 0, NUM_PROMPTS)[0]]
    longest = max(map(len, prompts))
    return SyncProbe(
        prompts,
        max(1, min(config.num_tokens, max_context_tokens - longest)),
        config.tolerance_nats or TOLERANCE_NATS[dtype],
        score,
    )


def _largest(values: Sequence[float]) -> float:
    """NaN counts as infinite: what cannot be compared does not agree."""
    return max((math.inf if math.isnan(value) else value for value in values), default=math.inf)
