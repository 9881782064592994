from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_engine.errors import RewardError
from grpo_engine.training.advantages import group_advantages


def has_variance(rewards: list[float | None]) -> bool:
    return any(group_advantages(rewards, normalize_std=False))


def test_two_rewards_are_plus_and_minus_one_over_sqrt_two() -> None:
    # mean 0.5, sample std sqrt(0.25 + 0.25) = 0.7071
    expected = [0.5 / math.sqrt(0.5), -0.5 / math.sqrt(0.5)]
    assert group_advantages([1.0, 0.0], normalize_std=True) == pytest.approx(expected)


def test_hand_computed_group_of_four() -> None:
    # mean 2, deviations -1 -1 0 2, sum of squares 6, sample variance 2
    rewards = [1.0, 1.0, 2.0, 4.0]
    expected = [-1 / 2**0.5, -1 / 2**0.5, 0.0, 2**0.5]
    assert group_advantages(rewards, normalize_std=True) == pytest.approx(expected, abs=1e-15)
    assert group_advantages(rewards, normalize_std=False) == [-1.0, -1.0, 0.0, 2.0]


def test_abstained_completions_count_in_neither_mean_nor_deviation() -> None:
    with_gaps = group_advantages([None, 1.0, None, 0.0, 1.0], normalize_std=True)
    without = group_advantages([1.0, 0.0, 1.0], normalize_std=True)
    assert with_gaps == [0.0, without[0], 0.0, without[1], without[2]]


@pytest.mark.parametrize("rewards", [[], [0.7], [None], [None, None], [None, 3.0], [0.1] * 16, [1e9] * 4])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_groups_without_variance_get_zero(rewards: list[float | None], normalize_std: bool) -> None:
    assert group_advantages(rewards, normalize_std=normalize_std) == [0.0] * len(rewards)


def test_float_residue_of_equal_rewards_is_not_blown_up() -> None:
    nearly = [0.1 + 0.2, 0.3, 0.3, 0.3]  # differ by 5.6e-17
    assert group_advantages(nearly, normalize_std=True) == [0.0] * 4
    # NeMo-RL issue 1518: a leave-one-out deviation in float32 gave 3692 here.
    assert group_advantages([0.95] + [0.35] * 7, normalize_std=True)[0] == pytest.approx(7 / math.sqrt(8))


def test_the_variance_rule_is_relative_to_the_mean() -> None:
    assert has_variance([0.0, 2e-6])
    assert not has_variance([0.0, 1e-6])
    assert not has_variance([1e6, 1e6 + 0.5])
    assert has_variance([1e6, 1e6 + 2.0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_reward_is_refused(bad: float) -> None:
    with pytest.raises(RewardError, match="must be finite"):
        group_advantages([0.0, bad], normalize_std=True)


@pytest.mark.parametrize("size", [2, 3, 8, 16, 64])
def test_one_outlier_reaches_the_bound_exactly(size: int) -> None:
    advantages = group_advantages([1.0] + [0.0] * (size - 1), normalize_std=True)
    assert advantages[0] == pytest.approx((size - 1) / math.sqrt(size), rel=1e-12)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=32))
def test_advantages_sum_to_zero_and_keep_the_bound(rewards: list[float]) -> None:
    advantages = group_advantages(rewards, normalize_std=True)
    bound = (len(rewards) - 1) / math.sqrt(len(rewards))
    assert max(map(abs, advantages)) <= bound * (1 + 1e-6)
    assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-6)
    if has_variance(rewards):
        assert math.fsum(a * a for a in advantages) == pytest.approx(len(rewards) - 1)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(-5, 5), min_size=2, max_size=16), st.integers(1, 100), st.integers(-100, 100))
def test_normalised_advantages_ignore_scale_and_shift_of_the_reward(rewards: list[int], scale: int, shift: int) -> None:
    moved = group_advantages([scale * r + shift for r in rewards], normalize_std=True)
    assert moved == pytest.approx(group_advantages(list(map(float, rewards)), normalize_std=True), abs=1e-9)
