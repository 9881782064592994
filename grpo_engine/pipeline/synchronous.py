"""The pipeline without overlap: every batch is sampled, scored and compared before the trainer sees it.

    prompts ──► sampler ──► rewards ──► reference ──► advantages ──► Batch
                module 1    module 3    module 2      (training)

The policy that samples is the policy that trains, so staleness is 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from grpo_engine.config import SamplingConfig
from grpo_engine.protocols import PromptSource, Sampler, Scorer
from grpo_engine.types import Completion, Group, Prompt, RewardPart, Rollout, SampleRequest, TrainRow

Score = Callable[[Sequence[Prompt], Sequence[Completion]], list[list[RewardPart]]]
"""Reward parts of each completion, in order."""
Combine = Callable[[Sequence[RewardPart]], float | None]
Advantages = Callable[[Sequence[float | None]], list[float]]
"""Advantages of one group's rewards."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step trains on."""

    number: int
    groups: list[Group]
    next_position: int
    """Prompt position after this batch."""
    policy_version: int
    seconds: dict[str, float] = field(default_factory=dict)
    """Time spent: rollout, reward, reference."""


@dataclass(frozen=True, slots=True)
class SynchronousPipeline:
    source: PromptSource
    sampler: Sampler
    score: Score
    combine: Combine
    advantages: Advantages
    reference: Scorer | None
    """None: KL to the reference is neither used nor measured."""
    sampling: SamplingConfig
    prompts_per_step: int
    group_size: int
    stream: tuple[int, ...]
    """First integers of every request's random stream: (run seed, stage index)."""
    keep_constant_groups: bool = False
    """Train on groups without reward variance too: they carry no advantage, but a KL term has a gradient."""

    def next_batch(self, number: int, position: int, policy_version: int) -> Batch:
        """Consumes prompts at `position`; waits for nothing; produces a scored batch."""
        prompts = self.source.take(position, self.prompts_per_step)
        started = time.perf_counter()
        completions = self.sampler.sample(self._requests(prompts, number), self.sampling)
        sampled = time.perf_counter()
        repeated = [prompt for prompt in prompts for _ in range(self.group_size)]
        parts = self.score(repeated, completions)
        scored = time.perf_counter()
        references = self._reference_logprobs(repeated, completions)
        compared = time.perf_counter()
        groups = [
            self._group(f"{number}-{index}", prompt, completions[rows], parts[rows], references[rows])
            for index, prompt in enumerate(prompts)
            for rows in [slice(index * self.group_size, (index + 1) * self.group_size)]
        ]
        seconds = {"rollout": sampled - started, "reward": scored - sampled, "reference": compared - scored}
        return Batch(number, groups, position + len(prompts), policy_version, seconds)

    def _requests(self, prompts: Sequence[Prompt], number: int) -> list[SampleRequest]:
        return [
            SampleRequest(prompt.token_ids, (*self.stream, prompt.position, index), f"{number}-{place}")
            for place, prompt in enumerate(prompts)
            for index in range(self.group_size)
        ]

    def _reference_logprobs(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion]
    ) -> Sequence[list[float] | None]:
        if self.reference is None:
            return [None] * len(completions)
        rows = [TrainRow(p.token_ids, c.token_ids) for p, c in zip(prompts, completions, strict=True)]
        return self.reference.score(rows, self.sampling.temperature)

    def _group(
        self,
        group_id: str,
        prompt: Prompt,
        completions: Sequence[Completion],
        parts: Sequence[list[RewardPart]],
        references: Sequence[list[float] | None],
    ) -> Group:
        rewards = [self.combine(each) for each in parts]
        rollouts = [
            Rollout(completion, each, reward, advantage, reference)
            for completion, each, reward, advantage, reference in zip(
                completions, parts, rewards, self.advantages(rewards), references, strict=True
            )
        ]
        return Group(group_id, prompt, rollouts, self._why_dropped(rollouts))

    def _why_dropped(self, rollouts: Sequence[Rollout]) -> str | None:
        if all(rollout.reward is None for rollout in rollouts):
            return "all_abstained"
        if not self.keep_constant_groups and all(rollout.advantage == 0 for rollout in rollouts):
            return "zero_variance"
        return None


def train_rows(groups: Sequence[Group], *, mask_truncated: bool) -> list[TrainRow]:
    """The rows the learner sees: groups that were not dropped, completions that were judged."""
    return [
        TrainRow(
            prompt_ids=group.prompt.token_ids,
            completion_ids=rollout.completion.token_ids,
            advantage=rollout.advantage,
            rollout_logprobs=rollout.completion.logprobs,
            ref_logprobs=rollout.ref_logprobs,
            kept_ids=rollout.completion.kept_ids,
        )
        for group in groups
        if group.dropped is None
        for rollout in group.rollouts
        if rollout.reward is not None and not (mask_truncated and rollout.completion.finish_reason == "length")
    ]
