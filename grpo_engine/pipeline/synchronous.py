"""The pipeline without overlap: every batch is sampled, scored and compared before the trainer sees it.

    prompts ──► sampler ──► rewards ──► reference, critic ──► all ranks' groups ──► advantages ──► Batch
                module 1    module 3    module 2               gathered             (training)

The policy that samples is the policy that trains, so staleness is 0. Each rank samples and scores whole groups of its
own; then every rank holds the whole batch and computes the same advantages from it, so no group is ever split.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from grpo_engine.config import SamplingConfig
from grpo_engine.errors import NonFinite
from grpo_engine.pipeline.prompts import take_fitting
from grpo_engine.pipeline.shares import contiguous_share
from grpo_engine.protocols import Communicator, PromptSource, Sampler, Scorer, ValueScorer
from grpo_engine.types import Completion, Group, Prompt, RewardPart, Rollout, SampleRequest, TrainRow

Score = Callable[[Sequence[Prompt], Sequence[Completion]], list[list[RewardPart]]]
"""Reward parts of each completion, in order."""
Combine = Callable[[Sequence[RewardPart]], float | None]
Assign = Callable[[list[Group], float | None], tuple[list[Group], float | None]]
"""Groups with their advantages, and why groups are dropped; the smoothed reward before and after the batch."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one batch of optimizer steps trains on; the same on every rank."""

    number: int
    groups: list[Group]
    next_position: int
    """Prompt position after this batch."""
    policy_version: int
    smoothed_reward: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    """Time spent by the slowest rank: rollout, reward, reference."""
    num_too_long: int = 0
    """Prompts left out because the model's context has no room for a completion of theirs."""


@dataclass(frozen=True, slots=True)
class SynchronousPipeline:
    source: PromptSource
    sampler: Sampler
    score: Score
    combine: Combine
    assign: Assign
    reference: Scorer | None
    """None: KL to the reference is neither used nor measured."""
    critic: ValueScorer | None
    """PPO's value model; None in group-relative forms."""
    communicator: Communicator
    sampling: SamplingConfig
    prompts_per_step: int
    group_size: int
    stream: tuple[int, ...]
    """First integers of every request's random stream: (run seed, stage index)."""

    def next_batch(self, number: int, position: int, policy_version: int, smoothed: float | None = None) -> Batch:
        """Consumes prompts at `position`; waits for the other ranks; produces a scored batch. Collective."""
        prompts, end = take_fitting(self.source, position, self.prompts_per_step)
        places = contiguous_share(len(prompts), self.communicator.rank, self.communicator.world_size)
        mine, seconds, broken = self._own_share(number, places, [prompts[place] for place in places])
        gathered = self.communicator.gather((mine, seconds, broken))
        if fault := next((fault for *_, fault in gathered if fault is not None), None):
            raise NonFinite(fault)
        groups, smoothed = self.assign([group for part, *_ in gathered for group in part], smoothed)
        slowest = {name: max(times.get(name, 0.0) for _, times, _ in gathered) for name in seconds}
        num_too_long = end - position - len(prompts)
        return Batch(number, groups, end, policy_version, smoothed, slowest, num_too_long)

    def _own_share(
        self, number: int, places: Sequence[int], prompts: Sequence[Prompt]
    ) -> tuple[list[Group], dict[str, float], str | None]:
        """As `_sample_groups`; numbers that are not finite are told to all ranks, so that all of them raise."""
        try:
            return *self._sample_groups(number, places, prompts), None
        except NonFinite as error:
            return [], {}, str(error)

    def _sample_groups(
        self, number: int, places: Sequence[int], prompts: Sequence[Prompt]
    ) -> tuple[list[Group], dict[str, float]]:
        """This rank's groups, without advantages, and the time each module took."""
        if not prompts:  # more ranks than prompts
            return [], dict.fromkeys(("rollout", "reward", "reference"), 0.0)
        started = time.perf_counter()
        completions = self.sampler.sample(self._requests(number, places, prompts), self.sampling)
        sampled = time.perf_counter()
        repeated = [prompt for prompt in prompts for _ in range(self.group_size)]
        parts = self.score(repeated, completions)
        scored = time.perf_counter()
        rows = [
            TrainRow(p.token_ids, c.token_ids, kept_ids=c.kept_ids) for p, c in zip(repeated, completions, strict=True)
        ]
        unknown: list[list[float] | None] = [None] * len(rows)
        references = self.reference.score(rows, self.sampling.temperature) if self.reference else unknown
        values = self.critic.values(rows) if self.critic else unknown
        compared = time.perf_counter()
        rollouts = [
            Rollout(completion, each, self.combine(each), ref_logprobs=reference, values=value)
            for completion, each, reference, value in zip(completions, parts, references, values, strict=True)
        ]
        size = self.group_size
        groups = [
            Group(f"{number}-{place}", prompt, rollouts[index * size : (index + 1) * size])
            for index, (place, prompt) in enumerate(zip(places, prompts, strict=True))
        ]
        return groups, {"rollout": sampled - started, "reward": scored - sampled, "reference": compared - scored}

    def _requests(self, number: int, places: Sequence[int], prompts: Sequence[Prompt]) -> list[SampleRequest]:
        return [
            SampleRequest(prompt.token_ids, (*self.stream, prompt.position, index), f"{number}-{place}")
            for place, prompt in zip(places, prompts, strict=True)
            for index in range(self.group_size)
        ]


def train_rows(groups: Sequence[Group], *, mask_truncated: bool, old_from_sampler: bool = False) -> list[TrainRow]:
    """The rows the learner sees: groups that were not dropped, completions that were judged.

    `old_from_sampler`: the ratio compares the policy with what was sampled from, not with its own forward."""
    return [
        TrainRow(
            prompt_ids=group.prompt.token_ids,
            completion_ids=rollout.completion.token_ids,
            advantage=rollout.advantage,
            rollout_logprobs=rollout.completion.logprobs,
            old_logprobs=rollout.completion.logprobs if old_from_sampler else None,
            ref_logprobs=rollout.ref_logprobs,
            kept_ids=rollout.completion.kept_ids,
            token_advantages=rollout.token_advantages,
            returns=rollout.returns,
            old_values=rollout.values,
        )
        for group in groups
        if group.dropped is None
        for rollout in group.rollouts
        if rollout.reward is not None and not (mask_truncated and rollout.completion.finish_reason == "length")
    ]


def num_judged(groups: Sequence[Group]) -> int:
    """Completions that count in a constant denominator: all that were judged, whatever was dropped or masked later."""
    return sum(rollout.reward is not None for group in groups for rollout in group.rollouts)
