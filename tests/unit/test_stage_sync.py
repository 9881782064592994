import math
from types import SimpleNamespace

import pytest
import torch

from grpo_engine.communicator import SingleRank
from grpo_engine.errors import NonFinite, RolloutUnavailable, WeightSyncFailed
from grpo_engine.model.greedy import GreedyScores
from grpo_engine.stages.probe import SyncProbe
from grpo_engine.stages.sync import Checksum, rest, send_weights
from grpo_engine.stages.update import train_on_batch
from grpo_engine.types import Completion
from tests.unit.stage_fakes import CountingLearner, batch_of, context_of, parts_of, rl_stage


class Copying:
    """Holds a version of the weights: its log-probability of every token is minus that. Some updates are lost."""

    shares_weights = False

    def __init__(self, *lost_updates):
        self.version, self.updates, self.lost, self.calls = 0, 0, set(lost_updates), []

    def load_weights(self, weights, policy_version):
        self.calls.append("load")
        self.received = dict(weights)
        self.version = self.version if self.updates in self.lost else policy_version
        self.updates += 1

    def sample(self, requests, sampling):
        assert sampling.temperature == 0
        self.calls.append("sample")
        told = [-float(self.version)] * sampling.max_new_tokens
        return [Completion([3] * len(told), "", "length", told, told) for _ in requests]

    def sleep(self):
        self.calls.append("sleep")


class Versioned(CountingLearner):
    """Its log-probability of every token is minus its version; `better` is how much likelier another token is."""

    better = 0.0

    def iter_full_weights(self):
        return iter([("w", torch.full((2, 2), float(self.policy_version)))])

    def score(self, rows):
        own = -float(self.policy_version)
        return [
            GreedyScores([own] * len(row.completion_ids), [own + self.better] * len(row.completion_ids)) for row in rows
        ]


class TwoRanks(SingleRank):
    """The other rank tells what this one tells, changed by `as_other`."""

    def __init__(self, as_other):
        self.as_other = as_other

    def gather(self, value):
        return [value, self.as_other(value)]


def syncing(tmp_path, sampler, learner=None, version=3):
    stage = rl_stage()
    context, parts = context_of(stage, tmp_path), parts_of(stage, learner or Versioned())
    parts.learner.policy_version = version
    parts.sampler = sampler
    parts.probe = SyncProbe([[5, 6], [7]], 4, 1e-3, parts.learner.score)
    return context, parts


def test_an_update_that_arrives_is_recorded_with_version_checksum_and_seconds(tmp_path):
    context, parts = syncing(tmp_path, Copying())
    values = send_weights(context, parts)
    [event] = context.journal.of("weight_sync")
    assert (event.policy_version, event.probe_gap_nats, event.repeated) == (3, 0.0, False)
    assert event.checksum == checksum({"w": torch.full((2, 2), 3.0)})
    assert values["rollout/probe_gap_nats"] == values["rollout/weight_updates_repeated"] == 0.0
    assert values["rollout/sync_s"] == event.seconds > 0
    assert parts.sampler.received["w"].tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_a_lost_update_is_repeated_once_and_told(tmp_path):
    context, parts = syncing(tmp_path, Copying(0))
    assert send_weights(context, parts)["rollout/weight_updates_repeated"] == 1.0
    assert parts.sampler.calls == ["load", "sample", "load", "sample"]
    [event], [warning] = context.journal.of("weight_sync"), context.journal.of("warning")
    assert event.repeated
    assert "differ by 3 nats" in warning.message


def test_both_gaps_are_told_where_they_are_allowed(tmp_path):
    learner = Versioned()
    learner.better = 2**-11
    context, parts = syncing(tmp_path, Copying(), learner)
    assert send_weights(context, parts)["rollout/probe_gap_nats"] == 2**-11
    [event] = context.journal.of("weight_sync")
    assert (event.probe_gap_nats, event.choice_gap_nats, event.repeated) == (0.0, 2**-11, False)


def test_a_sampler_that_is_less_sure_than_the_trainer_differs_too(tmp_path):
    sampler = Copying(0)
    sampler.version = 9
    context, parts = syncing(tmp_path, sampler)
    assert send_weights(context, parts)["rollout/weight_updates_repeated"] == 1.0


def test_a_sampler_that_gives_nothing_agrees_with_nothing(tmp_path):
    sampler = Copying()
    sampler.sample = lambda requests, sampling: [Completion([], "", "stop", [], []) for _ in requests]
    context, parts = syncing(tmp_path, sampler)
    with pytest.raises(WeightSyncFailed, match="0 probe tokens"):
        send_weights(context, parts)


def test_an_update_lost_twice_ends_the_run_with_its_figures(tmp_path):
    context, parts = syncing(tmp_path, Copying(0, 1))
    with pytest.raises(WeightSyncFailed, match=r"policy version 3 .* 8 probe tokens differ by 3 nats .* allows 0.001"):
        send_weights(context, parts)
    assert context.journal.of("weight_sync")[0].probe_gap_nats == 3.0


def test_a_token_that_the_trainer_would_not_have_taken_fails_the_probe(tmp_path):
    learner = Versioned()
    learner.better = 0.01
    context, parts = syncing(tmp_path, Copying(), learner)
    with pytest.raises(WeightSyncFailed, match=r"another token likelier by up to 0\.01"):
        send_weights(context, parts)
    assert parts.sampler.calls.count("load") == 2


def test_what_cannot_be_compared_fails_the_probe(tmp_path):
    context, parts = syncing(tmp_path, Copying())
    parts.sampler.version = math.nan
    parts.sampler.lost = {0, 1}
    with pytest.raises(WeightSyncFailed, match="differ by inf nats"):
        send_weights(context, parts)
    assert context.journal.of("weight_sync")[0].probe_gap_nats is None


def test_a_policy_that_broke_is_no_failed_update(tmp_path):
    context, parts = syncing(tmp_path, Copying(), version=math.inf)
    with pytest.raises(NonFinite, match="not finite after an update"):
        send_weights(context, parts)


def test_one_number_of_the_policy_that_is_not_finite_is_enough(tmp_path):
    context, parts = syncing(tmp_path, Copying())
    told = [GreedyScores([-3.0, math.nan, -3.0, -3.0], [0.0] * 4)] * 2
    parts.probe = SyncProbe([[5, 6], [7]], 4, 1e-3, lambda rows: told)
    with pytest.raises(NonFinite):
        send_weights(context, parts)


def test_a_sampler_that_refuses_the_weights_is_asked_twice_and_then_named(tmp_path):
    class Refusing(Copying):
        def load_weights(self, weights, policy_version):
            super().load_weights(weights, policy_version)
            raise ValueError("no parameter w")

    context, parts = syncing(tmp_path, Refusing())
    with pytest.raises(WeightSyncFailed, match="did not take the weights: ValueError: no parameter w"):
        send_weights(context, parts)
    assert parts.sampler.calls == ["load", "load"]


@pytest.mark.parametrize("error", [RolloutUnavailable("no server is left"), MemoryError()])
def test_an_update_that_fails_for_a_reason_of_its_own_keeps_it(tmp_path, error):
    class Failing(Copying):
        def load_weights(self, weights, policy_version):
            raise error

    context, parts = syncing(tmp_path, Failing())
    with pytest.raises(type(error)):
        send_weights(context, parts)


def test_numbers_that_are_not_finite_on_another_rank_are_raised_here_too(tmp_path):
    context, parts = syncing(tmp_path, Copying())
    context.communicator = TwoRanks(lambda mine: type(mine)(mine.seconds, not_finite="logits are NaN"))
    with pytest.raises(NonFinite, match="logits are NaN"):
        send_weights(context, parts)


def test_what_the_sampler_of_another_rank_refused_is_told_here(tmp_path):
    context, parts = syncing(tmp_path, Copying())
    context.communicator = TwoRanks(lambda mine: type(mine)(mine.seconds, refused="ValueError: no w"))
    with pytest.raises(WeightSyncFailed, match="did not take the weights: ValueError: no w"):
        send_weights(context, parts)


def test_all_ranks_repeat_what_one_of_them_lost(tmp_path):
    context, parts = syncing(tmp_path, Copying())
    far = iter([5.0, 0.0])
    context.communicator = TwoRanks(lambda mine: type(mine)(9.0, type(mine.result)(next(far), 0.0, 8)))
    values = send_weights(context, parts)
    assert parts.sampler.calls.count("load") == 2
    assert values["rollout/weight_updates_repeated"] == 1.0
    assert values["rollout/sync_s"] >= 18.0  # the slowest rank's


@pytest.mark.parametrize("order", [1, -1])
def test_every_copy_of_the_weights_is_probed(tmp_path, order):
    stale = Copying(0, 1)
    spread = Copying()
    spread.replicas = lambda: [spread, stale][::order]
    context, parts = syncing(tmp_path, spread)
    with pytest.raises(WeightSyncFailed):
        send_weights(context, parts)
    assert "sample" in stale.calls


def test_a_sampler_on_the_learners_own_weights_needs_no_probe(tmp_path):
    stage = rl_stage()
    context, parts = context_of(stage, tmp_path), parts_of(stage, Versioned())
    parts.learner.policy_version = 4
    parts.learner.iter_full_weights = None  # nobody asks for them
    assert list(send_weights(context, parts)) == ["rollout/sync_s"]
    assert parts.sampler.version == 4
    assert context.journal.of("weight_sync") == []


def test_a_sampler_that_can_sleep_does_so_while_the_trainer_works(tmp_path):
    context, parts = syncing(tmp_path, Copying(), version=0)
    values = train_on_batch(context, rl_stage(), parts, batch_of(4))
    assert parts.sampler.calls == ["sleep", "load", "sample"]
    assert values["rollout/probe_gap_nats"] == 0.0
    rest(SimpleNamespace(sampler=SimpleNamespace()))  # one that cannot goes on


def weights(**changes):
    return {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[3], [4]], dtype=torch.bfloat16)} | changes


def checksum(tensors):
    found = Checksum()
    assert [name for name, _ in found.watch(iter(tensors.items()))] == list(tensors)
    return found.hexdigest()


@pytest.mark.parametrize(
    "other",
    [
        weights(a=torch.tensor([1.0, 2.0000002])),
        weights(a=torch.tensor([[1.0, 2.0]])),
        weights(c=torch.zeros(1)),
        {"a": weights()["a"]},
        {"z": weights()["a"], "b": weights()["b"]},
        {},
    ],
)
def test_the_checksum_tells_weights_apart(other):
    assert checksum(weights()) == checksum(weights())
    assert checksum(other) != checksum(weights())
