import pytest

from grpo_engine.config_training import GuardsConfig
from grpo_engine.stages.guards import Guards
from grpo_engine.stages.reward_watch import BatchReward, RewardWatch
from grpo_engine.types import StepResult


def step(norm=0.5, loss=0.1, kl=0.02, applied=True):
    return StepResult(applied, norm, 1e-4, {"loss": loss, "policy/kl": kl})


def guards(**changes):
    config = GuardsConfig(**({"spike_window": 5} | changes))
    return Guards(config, 1.0, RewardWatch(config.max_reward_drop))


def calm(subject, count=5):
    return [subject.check(step()) for _ in range(count)]


def test_a_calm_run_raises_no_alarm():
    assert calm(guards(), 50) == [None] * 50


def test_a_policy_far_from_the_reference_is_an_alarm_at_once():
    subject = guards(max_kl=0.5)
    alarm = subject.check(step(kl=0.7))
    assert alarm is not None
    assert alarm.detector == "guard_kl"
    assert "0.7" in alarm.evidence
    assert "0.5" in alarm.evidence
    assert subject.alarmed


def test_one_high_gradient_is_what_clipping_is_for():
    subject = guards()
    calm(subject)
    assert subject.check(step(norm=50)) is None
    assert subject.check(step()) is None
    assert subject.check(step(norm=50)) is None


@pytest.mark.parametrize("spike", [{"norm": 50}, {"loss": -5}])
def test_two_spikes_in_a_row_are_an_alarm(spike):
    subject = guards()
    calm(subject)
    alarms = [subject.check(step(**spike)) for _ in range(2)]
    assert alarms[0] is None
    assert alarms[1] is not None
    assert alarms[1].detector == "guard_spike"


def test_a_jump_below_the_floor_is_no_spike():
    subject = guards()
    for _ in range(5):
        subject.check(step(norm=0.001, loss=0.0001))
    assert [subject.check(step(norm=0.9, loss=0.9)) for _ in range(3)] == [None] * 3


def test_without_a_window_there_is_no_spike_yet():
    assert [guards().check(step(norm=1e6)) for _ in range(4)] == [None] * 4


def test_spikes_do_not_become_the_new_usual():
    subject = guards()
    calm(subject)
    for _ in range(20):
        subject.check(step(norm=50))
    assert subject.norms == [0.5] * 5


def test_skipped_steps_and_empty_steps_say_nothing():
    subject = guards()
    calm(subject)
    assert [subject.check(step(norm=50, applied=False)) for _ in range(3)] == [None] * 3
    assert subject.check(StepResult(True, 0.0, 1e-4, {})) is None


def test_a_collapsed_policy_is_seen_though_nothing_of_it_can_be_trained():
    alarm = guards().check(StepResult(True, 0.0, 1e-4, {}), sampled_kl=12.0)
    assert alarm is not None
    assert alarm.detector == "guard_kl"
    assert guards().check(StepResult(True, 0.0, 1e-4, {}), sampled_kl=0.1) is None


def test_off_judges_nothing():
    assert guards(action="off").check(step(kl=100)) is None


def test_state_goes_on_exactly_after_a_resume():
    one, other = guards(), guards()
    calm(one)
    earned(one, 0.6, 0.1)
    one.check(step(norm=50))
    other.restore(one.state())
    assert other.check(step(norm=50)) == one.check(step(norm=50))
    assert other.state() == one.state()


def test_a_rollback_is_counted_and_ends_the_alarm():
    subject = guards()
    subject.check(step(kl=9))
    subject.rolled_back()
    assert (subject.rollbacks, subject.alarmed, subject.spikes) == (1, False, 0)


def earned(subject, *means):
    """Alarms of batches with these mean rewards; nothing was trained on in any of them."""
    return [subject.check(StepResult(True, 0.0, 1e-4, {}), None, BatchReward(mean, 0.01)) for mean in means]


def test_a_reward_that_collapsed_is_an_alarm_in_its_second_batch_though_nothing_was_trained():
    subject = guards()
    alarms = earned(subject, 0.5, 0.6, 0.1, 0.1, 0.1)
    assert [alarm and alarm.detector for alarm in alarms] == [None, None, None, "guard_reward", "guard_reward"]
    assert subject.alarmed


def test_one_poor_batch_makes_a_checkpoint_doubtful():
    subject = guards()
    assert earned(subject, 0.6, 0.1) == [None, None]
    assert subject.doubtful


def test_minibatches_of_one_batch_count_it_once():
    subject = guards()
    earned(subject, 0.6, 0.1)
    assert subject.check(step()) is None
    assert subject.doubtful


def test_after_a_rollback_the_restored_policy_sets_its_own_level():
    subject = guards()
    earned(subject, 0.9, 0.1, 0.1)
    subject.rolled_back()
    assert not subject.doubtful
    assert earned(subject, 0.3, 0.3, 0.3) == [None] * 3
    assert [alarm is not None for alarm in earned(subject, 0.05, 0.05)] == [False, True]
