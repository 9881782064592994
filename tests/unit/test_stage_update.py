import math

import pytest

from grpo_engine.errors import Diverged
from grpo_engine.stages.context import crossed
from grpo_engine.stages.guards import Alarm
from grpo_engine.stages.recovery import recover
from grpo_engine.stages.update import train_on_batch
from grpo_engine.types import StepResult
from tests.unit.stage_fakes import CountingLearner, batch_of, context_of, parts_of, rl_stage

CALM = StepResult(True, 0.5, 1e-4, {"loss": 0.1, "policy/kl": 0.01})
EXPLODED = StepResult(True, 0.5, 1e-4, {"loss": 0.1, "policy/kl": 50.0})


def trained(tmp_path, learner, **changes):
    stage = rl_stage(**changes)
    context, parts = context_of(stage, tmp_path), parts_of(stage, learner)
    context.last_good = tmp_path / "checkpoints" / "0-rl-000000"
    return context, parts, train_on_batch(context, stage, parts, batch_of(4))


def test_a_batch_is_one_step_by_default(tmp_path):
    learner = CountingLearner()
    context, parts, values = trained(tmp_path, learner)
    assert learner.calls[1:] == [("accumulate", [0, 0, 1, 1, 2, 2, 3, 3], 24.0), "step"]
    assert context.progress.step == parts.sampler.version == 1
    assert values["optimizer/gradient_norm"] == 0.5


def test_minibatches_and_epochs_take_the_groups_in_turn(tmp_path):
    learner = CountingLearner()
    context, *_ = trained(tmp_path, learner, minibatches=2, epochs=2)
    seen = [call[1] for call in learner.calls if call[0] == "accumulate"]
    assert seen == [[0, 0, 1, 1], [2, 2, 3, 3]] * 2
    assert [call[0] for call in learner.calls[:3]] == ["prepare", "prepare", "accumulate"]  # both before any update
    assert [event.step for event in context.journal.of("trained")] == [1, 2, 3, 4]
    assert [event.step for event in context.journal.of("metrics")] == [1, 2, 3]  # the last step's come with the batch's


def test_each_minibatch_is_divided_by_its_own_tokens(tmp_path):
    learner = CountingLearner()
    trained(tmp_path, learner, minibatches=3, num_steps=12)
    assert [call[2] for call in learner.calls if call[0] == "accumulate"] == [12.0, 6.0, 6.0]


def test_a_constant_normaliser_counts_completions(tmp_path):
    learner = CountingLearner()
    trained(tmp_path, learner, loss={"kind": "clip", "normalizer": "constant"})
    assert next(call[2] for call in learner.calls if call[0] == "accumulate") == 8.0


def test_an_explosion_is_told_once_and_only_reported_by_default(tmp_path):
    learner = CountingLearner(EXPLODED)
    context, *_ = trained(tmp_path, learner, epochs=3)
    findings = context.journal.of("finding")
    assert [(event.detector, event.severity, event.step) for event in findings] == [("guard_kl", "warning", 1)]
    assert learner.calls.count("step") == 3


def test_a_rollback_restores_the_last_good_checkpoint_and_leaves_the_rest_of_the_batch(tmp_path):
    learner = CountingLearner(CALM, EXPLODED)
    context, parts, values = trained(tmp_path, learner, epochs=4, guards={"action": "rollback"})
    assert learner.calls[-1] == ("roll_back", "0-rl-000000", 0.5)
    assert context.progress.step == 2
    assert (values["guards/rollbacks"], values["optimizer/rate_scale"]) == (1, 0.5)
    assert context.journal.of("finding")[0].severity == "critical"
    assert not parts.guards.alarmed


def test_too_many_rollbacks_end_the_run_and_name_the_checkpoint(tmp_path):
    stage = rl_stage(guards={"action": "rollback", "max_rollbacks": 2})
    context, parts = context_of(stage, tmp_path), parts_of(stage, CountingLearner())
    context.last_good = tmp_path / "checkpoints" / "0-rl-000007"
    alarm = Alarm("guard_kl", "The policy has run away", "50 nats.")
    for _ in range(2):
        recover(context, stage, parts, alarm)
    with pytest.raises(Diverged, match="0-rl-000007 is the last good checkpoint"):
        recover(context, stage, parts, alarm)
    assert len(context.journal.of("finding")) == 3


def test_the_kl_of_a_batch_that_trains_nothing_is_that_of_its_samples(tmp_path):
    stage = rl_stage(guards={"action": "rollback"})
    context, parts = context_of(stage, tmp_path), parts_of(stage, CountingLearner(StepResult(True, 0.0, 1e-4, {})))
    context.last_good = tmp_path / "checkpoints" / "0-rl-000000"
    batch = batch_of(4, ref_logprobs=[-9.0, -1.0, -1.0])  # the reference gives the first token e^-9, the policy e^-1
    values = train_on_batch(context, stage, parts, batch)
    assert values["policy/kl"] == pytest.approx((math.exp(-8) + 8 - 1) / 3)
    assert parts.learner.calls[-1][0] == "roll_back"


def test_the_stage_ends_at_its_last_step_even_within_a_batch(tmp_path):
    stage = rl_stage(epochs=4, num_steps=8)
    context, parts = context_of(stage, tmp_path), parts_of(stage, CountingLearner())
    context.progress.step = 6
    train_on_batch(context, stage, parts, batch_of(4))
    assert context.progress.step == 8


@pytest.mark.parametrize(("before", "after", "crosses"), [(9, 10, True), (10, 11, False), (8, 12, True), (0, 4, False)])
def test_a_multiple_of_ten_is_crossed(before, after, crosses):
    assert crossed(before, after, 10) is crosses
