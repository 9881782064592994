from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_engine.config_training import (
    AdvantageConfig,
    DrGRPOAdvantage,
    GAEAdvantage,
    GRPOAdvantage,
    RankAdvantage,
    RLOOAdvantage,
    SeedPaperAdvantage,
)
from grpo_engine.errors import RewardError
from grpo_engine.training import advantages as module
from grpo_engine.training.advantages import BOUNDS, FORMS, bound, group_advantages, has_variance
from tests.unit.oracles import advantages as oracle
from tests.unit.oracles.mutation import mutant

CONFIGS: list[Any] = [
    GRPOAdvantage(),
    SeedPaperAdvantage(),
    DrGRPOAdvantage(),
    RLOOAdvantage(),
    RankAdvantage(),
]
each_form = pytest.mark.parametrize("form", CONFIGS, ids=lambda form: form.kind)
GOLDEN = json.loads((Path(__file__).parent / "golden" / "advantages.json").read_text())
# Multiples of 1/64: differences are either 0 or far above the no-variance rule.
scores = st.lists(st.one_of(st.none(), st.integers(-200, 200).map(lambda i: i / 64)), max_size=24)


def disagreement(implementation: Any, form: Any, rewards: list[float | None]) -> float:
    """Largest difference to the naive oracle."""
    expected = oracle.group_advantages(rewards, form.kind)
    found = implementation.group_advantages(rewards, form)
    assert len(found) == len(expected)
    return max((abs(a - b) for a, b in zip(found, expected, strict=True)), default=0.0)


@each_form
@settings(deadline=None, max_examples=30)
@given(rewards=scores)
def test_every_form_equals_its_naive_oracle(form: Any, rewards: list[float | None]) -> None:
    assert disagreement(module, form, rewards) < 1e-9


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: f"{case['form']} {case['rewards']}")
def test_golden_values(case: dict[str, Any]) -> None:
    form = next(form for form in CONFIGS if form.kind == case["form"])
    assert group_advantages(case["rewards"], form) == pytest.approx(case["advantages"], rel=1e-14, abs=1e-15)


MUTATIONS = [
    ("grpo", "ddof=1", "ddof=0"),
    ("grpo", "deviation / std", "deviation * std"),
    ("seed_paper", "ddof=0", "ddof=1"),
    ("seed_paper", "+ SEED_EPSILON", "+ 1e-4"),
    ("dr_grpo", "_deviations(rewards)", "list(rewards)"),
    ("rloo", "(len(rewards) - 1)", "(len(rewards) + 1)"),
    ("rloo", "deviation * scale", "deviation"),
    ("rank", "bisect_right(ordered, reward + tie)", "bisect_left(ordered, reward - tie) + 1"),
    ("rank", "(n - 1)", "n"),
    ("rank", "- n)", "- n + 1)"),
    ("group_advantages", "0.0 if reward is None else next(advantages)", "next(advantages, 0.0)"),
    ("scored_rewards", "float(reward) for", "abs(float(reward)) for"),
    ("has_variance", "len(scored) < 2", "len(scored) < 4"),
    ("_deviations", "value - mean", "value + mean"),
    ("_std", "(len(values) - ddof)", "len(values)"),
]


@pytest.mark.parametrize(("function", "original", "mutated"), MUTATIONS)
def test_a_mutated_formula_disagrees_with_the_oracle(function: str, original: str, mutated: str) -> None:
    wrong = mutant(module, function, original, mutated)
    groups = [[1.0, None, 0.0, 0.0], [0.5, 2.0, 2.0, -1.0, 7.0], [3.0, 1.0], [None, None, 4.0], [0.25, 0.0, 1.0]]
    assert max(disagreement(wrong, form, list(group)) for form in CONFIGS for group in groups) > 1e-6


def test_every_kind_of_config_has_a_form_and_a_bound() -> None:
    kinds = {form.model_fields["kind"].default for form in get_args(get_args(AdvantageConfig)[0])}
    assert set(FORMS) == set(BOUNDS) == kinds - {"gae"}


def test_hand_computed_group_of_four() -> None:
    # mean 2; deviations -1 -1 0 2; squares sum to 6: sample variance 2, population variance 1.5
    rewards = [1.0, 1.0, 2.0, 4.0]
    root = 1.5**0.5 + 1e-8
    expected = {
        "grpo": [-1 / 2**0.5, -1 / 2**0.5, 0.0, 2**0.5],
        "seed_paper": [-1 / root, -1 / root, 0.0, 2 / root],
        "dr_grpo": [-1.0, -1.0, 0.0, 2.0],
        "rloo": [1 - 7 / 3, 1 - 7 / 3, 0.0, 4 - 4 / 3],
        "rank": [-2 / 3, -2 / 3, 1 / 3, 1.0],  # ranks 1.5 1.5 3 4 on the scale where 1 is -1 and 4 is 1
    }
    for form in CONFIGS:
        assert group_advantages(rewards, form) == pytest.approx(expected[form.kind], abs=1e-15)


@each_form
def test_abstained_completions_count_in_nothing(form: Any) -> None:
    with_gaps = group_advantages([None, 1.0, None, 0.0, 2.5], form)
    without = group_advantages([1.0, 0.0, 2.5], form)
    assert with_gaps == [0.0, without[0], 0.0, without[1], without[2]]


@each_form
@pytest.mark.parametrize("rewards", [[], [0.7], [None], [None, None], [None, 3.0], [0.1] * 16, [1e9] * 4])
def test_groups_without_variance_get_zero(form: Any, rewards: list[float | None]) -> None:
    assert group_advantages(rewards, form) == [0.0] * len(rewards)


@each_form
def test_float_residue_of_equal_rewards_is_neither_blown_up_nor_ranked(form: Any) -> None:
    assert group_advantages([0.1 + 0.2, 0.3, 0.3, 0.3], form) == [0.0] * 4  # they differ by 5.6e-17
    varied = group_advantages([0.1 + 0.2, 0.3, 5.0], form)
    assert varied[0] == pytest.approx(varied[1], abs=1e-12)


def test_one_different_reward_of_eight_is_no_residue() -> None:
    # NeMo-RL issue 1518: a leave-one-out deviation in float32 gave 3692 here.
    assert group_advantages([0.95] + [0.35] * 7, GRPOAdvantage())[0] == pytest.approx(7 / math.sqrt(8))


def test_the_variance_rule_is_relative_to_the_mean() -> None:
    assert has_variance([0.0, 2e-6])
    assert not has_variance([0.0, 1e-6])
    assert not has_variance([1e6, 1e6 + 0.5])
    assert has_variance([1e6, 1e6 + 2.0])


@each_form
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e101])
def test_a_reward_that_is_not_finite_is_refused(form: Any, bad: float) -> None:
    with pytest.raises(RewardError, match="must be finite and at most 1e\\+100 in size; return None to abstain"):
        group_advantages([0.0, bad, None], form)


def test_large_rewards_stay_exact() -> None:
    assert group_advantages([1e100, 0.0], GRPOAdvantage()) == pytest.approx([0.5**0.5, -(0.5**0.5)])


def test_token_advantages_are_no_group_form() -> None:
    with pytest.raises(ValueError, match="advantage gae is not group-relative"):
        group_advantages([0.0, 1.0], GAEAdvantage())
    with pytest.raises(ValueError, match="advantage gae is not group-relative"):
        bound("gae", 4, 1.0)


# ---------------------------------------------------------------- bounds
@each_form
@pytest.mark.parametrize("size", [2, 3, 8, 16, 64])
@pytest.mark.parametrize("spread", [1e-5, 1.0, 40.0])
def test_one_outlier_among_equals_reaches_the_bound(form: Any, size: int, spread: float) -> None:
    for outlier in (spread, -spread):
        advantages = group_advantages([outlier] + [0.0] * (size - 1), form)
        assert abs(advantages[0]) == pytest.approx(bound(form.kind, size, spread), rel=1e-12)


@each_form
@settings(deadline=None, max_examples=40)
@given(rewards=st.lists(st.one_of(st.none(), st.floats(-1e3, 1e3)), min_size=2, max_size=32))
def test_the_bound_is_never_exceeded(form: Any, rewards: list[float | None]) -> None:
    scored = [reward for reward in rewards if reward is not None] or [0.0]
    largest = max(map(abs, group_advantages(rewards, form)))
    assert largest <= bound(form.kind, len(rewards), max(scored) - min(scored)) * (1 + 1e-8)
    assert largest <= bound(form.kind, len(scored), max(scored) - min(scored)) * (1 + 1e-8)


def test_bounds_without_a_range_are_limits() -> None:
    assert bound("seed_paper", 16) == pytest.approx(math.sqrt(15))
    assert bound("grpo", 16) == 15 / 4
    assert bound("rloo", 16) == math.inf
    assert bound("rank", 1) == bound("grpo", 0) == bound("rloo", 8, 0.0) == 0.0
    with pytest.raises(ValueError, match="reward_range -1 must not be negative"):
        bound("grpo", 4, -1)


BOUND_MUTATIONS = [
    ("_seed_bound", "* n /", "/"),
    ("_seed_bound", "math.sqrt(n - 1)", "math.sqrt(n)"),
    ("bound", "group_size >= 2", "group_size >= 3"),
]


@pytest.mark.parametrize(("function", "original", "mutated"), BOUND_MUTATIONS)
def test_a_mutated_bound_is_not_reached(function: str, original: str, mutated: str) -> None:
    wrong = mutant(module, function, original, mutated)
    cases = [(2, 1e-5), (16, 1e-5), (16, 1.0)]
    reached = [abs(group_advantages([r] + [0.0] * (n - 1), SeedPaperAdvantage())[0]) for n, r in cases]
    bounds = [wrong.bound("seed_paper", n, r) for n, r in cases]
    assert bounds != pytest.approx(reached, rel=1e-6)


# ---------------------------------------------------------------- properties
@each_form
@settings(deadline=None, max_examples=25)
@given(
    rewards=st.lists(st.integers(-5, 5), min_size=2, max_size=16), scale=st.integers(1, 64), shift=st.integers(-99, 99)
)
def test_shifts_change_nothing_and_advantages_sum_to_zero(
    form: Any, rewards: list[int], scale: int, shift: int
) -> None:
    plain = group_advantages([scale * float(reward) for reward in rewards], form)
    moved = group_advantages([scale * float(reward) + shift for reward in rewards], form)
    assert moved == pytest.approx(plain, abs=1e-9)
    assert math.fsum(plain) == pytest.approx(0.0, abs=1e-9)


@each_form
def test_the_order_of_a_group_does_not_matter(form: Any) -> None:
    rewards = [0.5, 1.0, None, 0.0, 1.0, 0.25]
    order = random.Random(0).sample(range(6), 6)
    advantages = group_advantages(rewards, form)
    assert group_advantages([rewards[i] for i in order], form) == pytest.approx([advantages[i] for i in order])


def test_normalised_forms_ignore_the_scale_of_rewards() -> None:
    for form in (GRPOAdvantage(), RankAdvantage()):
        assert group_advantages([0, 30, 60, 90], form) == pytest.approx(group_advantages([0, 1, 2, 3], form))
