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
from grpo_engine.protocols import Communicator, PromptSource, Rewards, Sampler, Scorer, ValueScorer
from grpo_engine.types import Group, Prompt, RewardFault, Rollout, SampleRequest, TrainRow

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
    counts: dict[str, float] = field(default_factory=dict)
    """What the rewards counted, all ranks together, by name in the metric catalogue."""
    faults: list[RewardFault] = field(default_factory=list)
    """What reward parts could not judge, and why."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank gives to a batch."""

    groups: list[Group] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    faults: list[RewardFault] = field(default_factory=list)
    broken: str | None = None
    """Numbers of the model that are not finite."""


@dataclass(frozen=True, slots=True)
class SynchronousPipeline:
    source: PromptSource
    sampler: Sampler
    rewards: Rewards
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
    count_behaviours: Callable[[str], dict[str, int]] = lambda text: {}
    """How often a completion's text reflects, backtracks …, by name."""

    def next_batch(self, number: int, position: int, policy_version: int, smoothed: float | None = None) -> Batch:
        """Consumes prompts at `position`; waits for the other ranks; produces a scored batch. Collective."""
        prompts, end = take_fitting(self.source, position, self.prompts_per_step)
        places = contiguous_share(len(prompts), self.communicator.rank, self.communicator.world_size)
        mine = self._own_share(number, places, [prompts[place] for place in places])
        shares = self.communicator.gather(mine)
        if fault := next((share.broken for share in shares if share.broken is not None), None):
            raise NonFinite(fault)
        groups = self.rewards.combine([group for share in shares for group in share.groups])
        groups, smoothed = self.assign(groups, smoothed)
        slowest = {name: max(share.seconds.get(name, 0.0) for share in shares) for name in mine.seconds}
        counts = _summed([share.counts for share in shares])
        faults = [fault for share in shares for fault in share.faults]
        num_too_long = end - position - len(prompts)
        return Batch(number, groups, end, policy_version, smoothed, slowest, num_too_long, counts, faults)

    def _own_share(self, number: int, places: Sequence[int], prompts: Sequence[Prompt]) -> Share:
        """As `_sample_groups`; numbers that are not finite are told to all ranks, so that all of them raise."""
        self.rewards.take_counts()  # what evaluation did is not the batch's
        try:
            groups, seconds = self._sample_groups(number, places, prompts)
        except NonFinite as error:
            return Share(broken=str(error))
        return Share(groups, seconds, self.rewards.take_counts(), self.rewards.take_faults())

    def _sample_groups(
        self, number: int, places: Sequence[int], prompts: Sequence[Prompt]
    ) -> tuple[list[Group], dict[str, float]]:
        """This rank's groups, without rewards and advantages, and the time each module took."""
        if not prompts:  # more ranks than prompts
            return [], dict.fromkeys(("rollout", "reward", "reference"), 0.0)
        started = time.perf_counter()
        completions = self.sampler.sample(self._requests(number, places, prompts), self.sampling)
        sampled = time.perf_counter()
        repeated = [prompt for prompt in prompts for _ in range(self.group_size)]
        parts = self.rewards.score(repeated, completions)
        behaviours = [self.count_behaviours(completion.text) for completion in completions]
        scored = time.perf_counter()
        rows = [
            TrainRow(p.token_ids, c.token_ids, kept_ids=c.kept_ids) for p, c in zip(repeated, completions, strict=True)
        ]
        unknown: list[list[float] | None] = [None] * len(rows)
        references = self.reference.score(rows, self.sampling.temperature) if self.reference else unknown
        values = self.critic.values(rows) if self.critic else unknown
        compared = time.perf_counter()
        rollouts = [
            Rollout(completion, each, None, ref_logprobs=reference, values=value, behaviours=counted)
            for completion, each, reference, value, counted in zip(
                completions, parts, references, values, behaviours, strict=True
            )
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


def _summed(counts: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for counted in counts for name in counted)
    return {name: sum(counted.get(name, 0.0) for counted in counts) for name in names}


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
