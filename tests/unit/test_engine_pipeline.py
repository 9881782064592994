from dataclasses import replace

import pytest

from grpo_engine.communicator import SingleRank
from grpo_engine.config import SamplingConfig
from grpo_engine.errors import NonFinite
from grpo_engine.pipeline.synchronous import Share, SynchronousPipeline, num_judged, train_rows
from grpo_engine.stages.measure import batch_metrics, batch_reward, dropped_groups, sampler_metrics
from grpo_engine.types import Completion, Prompt, RewardFault, RewardPart


class Counting:
    """Prompts whose text is their position."""

    size = None

    def take(self, position, count):
        return [Prompt(f"p/{i}", i, str(i), [i], {"answer": str(i)}) for i in range(position, position + count)]

    def held_out(self, count):
        return []


class Echo:
    """Samples the prompt's id and the completion's index; even indices end by themselves."""

    def sample(self, requests, sampling):
        self.requests = list(requests)
        return [
            Completion([r.prompt_ids[0], index], "", "length" if index % 2 else "stop", [-1, -1], [-1, -1])
            for r in requests
            for index in [r.stream[-1]]
        ]

    def load_weights(self, weights, policy_version):
        pass


def assign(groups, smoothed, *, keep_constant=False):
    """Rewards minus their mean; the number of batches as the smoothed reward."""
    return [_assigned(group, keep_constant) for group in groups], (smoothed or 0) + 1


def _assigned(group, keep_constant):
    known = [r.reward for r in group.rollouts if r.reward is not None]
    mean = sum(known) / len(known) if known else 0.0
    rollouts = [replace(r, advantage=0.0 if r.reward is None else r.reward - mean) for r in group.rollouts]
    constant = not keep_constant and all(r.advantage == 0 for r in rollouts)
    dropped = "all_abstained" if not known else "zero_variance" if constant else None
    return replace(group, rollouts=rollouts, dropped=dropped)


class OnePart:
    """Rewards of one part of weight 1; every completion scored counts in `scored`."""

    def __init__(self, reward):
        self.reward, self.scored, self.faults = reward, 0, []

    def score(self, prompts, completions):
        self.scored += len(completions)
        return [[RewardPart("r", self.reward(c), 1.0)] for c in completions]

    def combine(self, groups):
        return [
            replace(group, rollouts=[replace(rollout, reward=rollout.parts[0].value) for rollout in group.rollouts])
            for group in groups
        ]

    def take_counts(self):
        scored, self.scored = self.scored, 0
        return {"reward/late": float(scored)}

    def take_faults(self):
        return self.faults


def build(reward, group_size=4, keep_constant=False, communicator=None, **changes):
    parts = {"reference": None, "critic": None, "sampling": SamplingConfig(), "prompts_per_step": 3, "stream": (7, 1)}
    return SynchronousPipeline(
        Counting(), Echo(), OnePart(reward),
        lambda groups, smoothed: assign(groups, smoothed, keep_constant=keep_constant),
        communicator=communicator or SingleRank(), group_size=group_size, **(parts | changes),
    )  # fmt: skip


class OneOfTwo:
    """Rank `rank` of two; the other rank's values are those it was given before."""

    world_size = 2

    def __init__(self, rank, other=None):
        self.rank, self.other, self.sent = rank, other, None

    def gather(self, value):
        self.sent = value
        return [value, self.other] if self.rank == 0 else [self.other, value]


def test_completions_stay_with_their_prompt():
    batch = build(lambda c: float(c.token_ids[1])).next_batch(12, position=5, policy_version=3)
    assert [group.prompt.position for group in batch.groups] == [5, 6, 7]
    assert all(r.completion.token_ids[0] == g.prompt.position for g in batch.groups for r in g.rollouts)
    assert batch.next_position == 8
    assert [group.id for group in batch.groups] == ["12-0", "12-1", "12-2"]


def test_prompts_without_room_are_replaced_by_the_next_and_counted():
    class Gaps(Counting):
        def take(self, position, count):
            return [prompt for prompt in super().take(position, count) if prompt.position % 3]

    pipeline = build(lambda c: 1.0)
    batch = replace(pipeline, source=Gaps()).next_batch(1, position=4, policy_version=0)
    assert [group.prompt.position for group in batch.groups] == [4, 5, 7]
    assert (batch.next_position, batch.num_too_long) == (8, 1)


def test_every_request_has_a_random_stream_of_its_own():
    pipeline = build(lambda c: 1.0)
    pipeline.next_batch(1, position=0, policy_version=0)
    streams = [request.stream for request in pipeline.sampler.requests]
    assert len(set(streams)) == 12
    assert streams[0] == (7, 1, 0, 0)


def test_groups_without_variance_are_dropped_with_their_reason():
    batch = build(lambda c: 1.0).next_batch(1, 0, 0)
    assert dropped_groups(batch.groups) == {"zero_variance": 3}
    assert train_rows(batch.groups, mask_truncated=False) == []


def test_groups_without_variance_are_kept_for_a_kl_term():
    batch = build(lambda c: 1.0, keep_constant=True).next_batch(1, 0, 0)
    assert len(train_rows(batch.groups, mask_truncated=False)) == 12


def test_a_group_that_nobody_judged_never_trains():
    batch = build(lambda c: None, keep_constant=True).next_batch(1, 0, 0)
    assert dropped_groups(batch.groups) == {"all_abstained": 3}
    assert "reward/mean" not in batch_metrics(batch.groups)


def test_an_abstained_completion_is_left_out_of_its_group():
    batch = build(lambda c: None if c.token_ids[1] == 0 else float(c.token_ids[1])).next_batch(1, 0, 0)
    assert len(train_rows(batch.groups, mask_truncated=False)) == 9


def test_truncated_completions_are_masked_by_finish_reason():
    batch = build(lambda c: float(c.token_ids[1])).next_batch(1, 0, 0)
    rows = train_rows(batch.groups, mask_truncated=True)
    assert {row.completion_ids[1] for row in rows} == {0, 2}


def test_batch_metrics_are_means_over_all_completions():
    values = batch_metrics(build(lambda c: float(c.token_ids[1])).next_batch(1, 0, 0).groups)
    assert values["reward/mean"] == 1.5
    assert values["reward/part/r/mean"] == 1.5
    assert values["completion/truncated_share"] == 0.5
    assert values["completion/mean_length_tokens"] == 2
    assert values["groups/zero_variance_share"] == 0
    assert values["groups/trained"] == 3
    assert values["advantage/abs_mean"] == 1.0


def with_rewards(*rewards):
    groups = build(lambda c: 1.0).next_batch(1, 0, 0).groups
    return [
        replace(group, rollouts=[replace(rollout, reward=reward) for rollout in group.rollouts])
        for group, reward in zip(groups, rewards, strict=True)
    ]


def test_what_a_batch_earned_has_the_error_of_its_groups_means():
    earned = batch_reward(with_rewards(0.0, 0.5, 1.0))
    assert earned.mean == 0.5
    assert earned.error == pytest.approx(0.5 / 3**0.5)
    assert batch_reward(with_rewards(None, 0.5, 1.0)).mean == 0.75
    assert batch_reward(with_rewards(None, None, 1.0)) is None


def test_two_ranks_make_the_batch_of_one():
    alone = build(lambda c: float(c.token_ids[1])).next_batch(12, 5, 3, smoothed=1.0)
    second = OneOfTwo(1, other=Share(seconds=dict.fromkeys(("rollout", "reward", "reference"), 9.0)))
    build(lambda c: float(c.token_ids[1]), communicator=second).next_batch(12, 5, 3)
    first = OneOfTwo(0, other=second.sent)
    both = build(lambda c: float(c.token_ids[1]), communicator=first).next_batch(12, 5, 3, smoothed=1.0)
    assert len(second.sent.groups) == 1  # of three groups
    assert both.groups == alone.groups
    assert both.smoothed_reward == alone.smoothed_reward == 2.0


def test_a_rank_without_prompts_takes_part_all_the_same():
    idle = OneOfTwo(1, other=Share())
    batch = build(lambda c: 1.0, communicator=idle, prompts_per_step=1).next_batch(1, 0, 0)
    assert batch.groups == []
    assert idle.sent.groups == []


def test_numbers_that_are_not_finite_on_one_rank_end_the_batch_on_all():
    healthy = OneOfTwo(0, other=Share(broken="logits are NaN"))
    with pytest.raises(NonFinite, match="logits are NaN"):
        build(lambda c: 1.0, communicator=healthy).next_batch(1, 0, 0)


def test_the_ratio_may_be_taken_against_the_sampler():
    batch = build(lambda c: float(c.token_ids[1])).next_batch(1, 0, 0)
    assert {row.old_logprobs is None for row in train_rows(batch.groups, mask_truncated=False)} == {True}
    rows = train_rows(batch.groups, mask_truncated=False, old_from_sampler=True)
    assert all(row.old_logprobs == row.rollout_logprobs for row in rows)


def test_dropped_and_truncated_completions_count_among_the_judged():
    batch = build(lambda c: None if c.token_ids[1] == 0 else 1.0).next_batch(1, 0, 0)
    assert train_rows(batch.groups, mask_truncated=True) == []
    assert num_judged(batch.groups) == 9


def test_what_samplers_tell_is_summed_where_it_counts_and_averaged_elsewhere():
    class Telling:
        def take_metrics(self):
            return {"rollout/drafted_tokens": 30.0, "rollout/accepted_share": 0.5}

    other = {"rollout/drafted_tokens": 10.0, "rollout/accepted_share": 0.9, "rollout/draft_gain": 1.5}
    assert sampler_metrics(Telling(), OneOfTwo(0, other)) == {
        "rollout/drafted_tokens": 40.0, "rollout/accepted_share": 0.7, "rollout/draft_gain": 1.5
    }  # fmt: skip


def test_what_rewards_count_and_cannot_judge_is_told_of_all_ranks():
    fault = RewardFault("r", "ValueError", "r failed: ValueError")
    elsewhere = Share(counts={"reward/late": 1.0}, faults=[fault])
    pipeline = build(lambda c: 1.0, communicator=OneOfTwo(0, other=elsewhere))
    pipeline.rewards.scored = 100  # by an evaluation, which is not the batch's
    batch = pipeline.next_batch(1, 0, 0)
    assert batch.counts == {"reward/late": 2 * 4 + 1.0}  # two of three prompts here
    assert batch.faults == [fault]


def test_behaviours_are_counted_beside_the_reward():
    batch = build(lambda c: 1.0, count_behaviours=lambda text: {"reflection": 2}).next_batch(1, 0, 0)
    assert {rollout.behaviours["reflection"] for group in batch.groups for rollout in group.rollouts} == {2}
    assert batch_metrics(batch.groups)["behaviour/reflection"] == 2.0
