import json
import math

import pytest

from grpo_engine.stages.reward_watch import BatchReward, RewardWatch, pooled

SLIDE = [
    (0.436, 0.027), (0.474, 0.076), (0.451, 0.107), (0.243, 0.073), (0.131, 0.027), (0.362, 0.096), (0.275, 0.078),
    (0.120, 0.016), (0.182, 0.062), (0.166, 0.059), (0.141, 0.048), (0.213, 0.075), (0.099, 0.001),
]  # fmt: skip
"""Mean rewards and their errors of the demo at a rate of 1e-3 (seed 2), whose parts give -0.1 at least."""


def watch(max_drop=0.3, floor=0.0):
    return RewardWatch(max_drop, floor)


def told(subject, *means, error=0.01):
    """Whether each batch is a collapse."""
    found = []
    for mean in means:
        subject.add(BatchReward(mean, error))
        found.append(subject.collapse is not None)
    return found


def test_a_collapse_is_told_in_its_second_batch_with_its_figures():
    subject = watch()
    assert told(subject, 0.5, 0.6, 0.1, 0.1) == [False, False, False, True]
    for said in ("0.1 in 2 batches running", "at least 0.58", "30%", "guards.max_reward_drop"):
        assert said in subject.collapse


def test_a_collapse_lasts_until_the_reward_is_back():
    subject = watch()
    assert told(subject, 0.6, 0.1, 0.1, 0.1, 0.6, 0.6) == [False, False, True, True, True, True]
    assert told(subject, 0.6, 0.6) == [False, False]


def test_a_slide_hidden_in_each_batch_s_doubt_shows_over_four():
    subject = watch(floor=-0.1)
    found = []
    for mean, error in SLIDE:
        subject.add(BatchReward(mean, error))
        found.append(subject.collapse or "")
    assert [bool(words) for words in found[:11]] == [False] * 10 + [True]
    assert "over the last 4 batches" in found[10]


def test_a_slide_makes_a_checkpoint_doubtful_long_before_it_is_an_alarm():
    subject = watch(floor=-0.1)
    doubtful = []
    for mean, error in SLIDE:
        subject.add(BatchReward(mean, error))
        doubtful.append(subject.falls_short)
    assert doubtful == [False] * 4 + [True] * 9


def test_noise_is_no_collapse():
    assert told(watch(), 0.5, 0.3, 0.3, 0.3, 0.3, error=0.1) == [False] * 5


def test_one_poor_batch_among_good_ones_is_no_collapse():
    subject = watch()
    assert told(subject, 0.6, 0.0, 0.6, 0.6, 0.6, 0.0, 0.6) == [False] * 7


def test_height_counts_from_the_lowest_reward():
    assert told(watch(floor=-1.0), 0.2, -0.1, -0.1, -0.1) == [False] * 4
    assert told(watch(floor=-1.0), 0.2, -0.3, -0.3) == [False, False, True]


def test_nothing_is_watched_where_that_is_asked():
    subject = watch(max_drop=None)
    assert told(subject, 0.9, 0.0, 0.0) == [False] * 3
    assert not subject.falls_short


def test_batches_are_pooled_as_independent_measurements():
    mean = pooled([BatchReward(0.2, 0.03), BatchReward(0.4, 0.04)])
    assert mean.mean == pytest.approx(0.3)
    assert mean.error == pytest.approx(math.sqrt(0.03**2 + 0.04**2) / 2)


def test_after_forgetting_another_level_begins():
    subject = watch()
    told(subject, 0.9, 0.1, 0.1, 0.1)
    subject.forget()
    assert told(subject, 0.6, 0.6, 0.6, 0.6) == [False] * 4
    assert not subject.falls_short


def test_the_state_goes_through_json_and_continues_exactly():
    one, other = watch(), watch()
    told(one, 0.6, 0.6, 0.1)
    other.restore(json.loads(json.dumps(one.state())))
    assert other == one
    assert told(other, 0.1) == told(one, 0.1) == [True]
