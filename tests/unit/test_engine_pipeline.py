from grpo_engine.config import SamplingConfig
from grpo_engine.pipeline.synchronous import SynchronousPipeline, train_rows
from grpo_engine.stages.measure import batch_metrics, dropped_groups
from grpo_engine.types import Completion, Prompt, RewardPart


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


def build(reward, group_size=4, **changes):
    def score(prompts, completions):
        return [[RewardPart("r", reward(c), 1.0)] for c in completions]

    def advantages(rewards):
        known = [r for r in rewards if r is not None]
        return [0.0 if r is None else r - sum(known) / len(known) for r in rewards]

    parts = {"reference": None, "sampling": SamplingConfig(), "prompts_per_step": 3, "stream": (7, 1), **changes}
    return SynchronousPipeline(
        Counting(), Echo(), score, lambda p: p[0].value, advantages, group_size=group_size, **parts
    )


def test_completions_stay_with_their_prompt():
    batch = build(lambda c: float(c.token_ids[1])).next_batch(12, position=5, policy_version=3)
    assert [group.prompt.position for group in batch.groups] == [5, 6, 7]
    assert all(r.completion.token_ids[0] == g.prompt.position for g in batch.groups for r in g.rollouts)
    assert batch.next_position == 8
    assert [group.id for group in batch.groups] == ["12-0", "12-1", "12-2"]


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
    batch = build(lambda c: 1.0, keep_constant_groups=True).next_batch(1, 0, 0)
    assert len(train_rows(batch.groups, mask_truncated=False)) == 12


def test_a_group_that_nobody_judged_never_trains():
    batch = build(lambda c: None, keep_constant_groups=True).next_batch(1, 0, 0)
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
