from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_engine.training import gae as module
from grpo_engine.training.gae import gae, gae_bound, whiten, whitened_bound
from tests.unit.oracles import advantages as oracle
from tests.unit.oracles.mutation import mutant

GOLDEN = json.loads((Path(__file__).parent / "golden" / "gae.json").read_text())
masks = st.lists(st.booleans(), min_size=1, max_size=12)
shares = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def flatten(rows: Any) -> list[float]:
    return [value for row in rows for value in row]


def disagreement(implementation: Any, mask: list[bool], gamma: float, lam: float, seed: int) -> float:
    """Largest difference to the naive oracle, over advantages and returns."""
    draw = random.Random(seed)
    rewards, values = ([draw.gauss(0, 1) for _ in mask] for _ in range(2))
    expected = flatten(oracle.gae(rewards, values, mask, gamma, lam))
    found = flatten(implementation.gae(rewards, values, mask, gamma, lam))
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


def whitening_disagreement(implementation: Any, lengths: list[int], seed: int) -> float:
    draw = random.Random(seed)
    rows = [[draw.gauss(3, 2) for _ in range(length)] for length in lengths]
    flags = [[draw.random() < 0.7 for _ in row] for row in rows]
    flags[0][:2] = [True, True]
    expected, found = oracle.whiten(rows, flags), implementation.whiten(rows, flags)
    return max(abs(a - b) for a, b in zip(flatten(found), flatten(expected), strict=True))


@settings(deadline=None, max_examples=80)
@given(mask=masks, gamma=st.sampled_from([0.9, 1.0]), lam=shares, seed=st.integers(0, 99))
def test_gae_equals_its_naive_oracle(mask: list[bool], gamma: float, lam: float, seed: int) -> None:
    assert disagreement(module, mask, gamma, lam, seed) < 1e-12


@settings(deadline=None, max_examples=40)
@given(lengths=st.lists(st.integers(2, 9), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_whitening_equals_its_naive_oracle(lengths: list[int], seed: int) -> None:
    assert whitening_disagreement(module, lengths, seed) < 1e-12


@pytest.mark.parametrize("case", GOLDEN["cases"])
def test_golden_values(case: str) -> None:
    gamma, lam = map(float, case.split())
    mask = [True] * len(GOLDEN["values"])
    advantages, returns = gae(GOLDEN["rewards"], GOLDEN["values"], mask, gamma, lam)
    expected = GOLDEN["cases"][case]
    assert advantages == pytest.approx(expected["advantages"], rel=1e-14)
    assert returns == pytest.approx(expected["returns"], rel=1e-14)
    assert whiten([advantages], [mask])[0] == pytest.approx(expected["whitened"], rel=1e-13)


MUTATIONS = [
    ("gae", "- values[t]", "+ values[t]"),
    ("gae", "gamma * next_value", "next_value"),
    ("gae", "gamma * lam * next_advantage", "lam * next_advantage"),
    ("gae", "gamma * lam * next_advantage", "gamma * next_advantage"),
    ("gae", "+ skipped_reward", ""),
    ("gae", "advantages[t] + values[t]", "advantages[t]"),
    ("gae", "continue", "next_value = next_advantage = 0.0; continue"),  # what OpenRLHF does at tool tokens
    ("gae", "values[t], advantages[t], 0.0", "values[t], advantages[t], skipped_reward"),
    ("whiten", "max(1, len(flat) - 1)", "len(flat)"),
    ("whiten", "(a - mean) / std if on", "a / std if on"),
    ("whiten", "if on else 0.0", "if True else 0.0"),
    ("whiten", "strict=True) if on]", "strict=True)]"),
]


@pytest.mark.parametrize(("function", "original", "mutated"), MUTATIONS)
def test_a_mutated_formula_disagrees_with_the_oracle(function: str, original: str, mutated: str) -> None:
    wrong = mutant(module, function, original, mutated)
    mask = [True, False, True, True, False, False, True, False]
    worst = disagreement(wrong, mask, 0.9, 0.95, 0)
    assert max(worst, whitening_disagreement(wrong, [4, 7, 5], 0)) > 1e-3


def test_hand_computed_with_a_reward_at_the_end() -> None:
    # deltas: 0 + 0.8 - 0.5 = 0.3 and 1 + 0 - 0.8 = 0.2; A_0 = 0.3 + 0.5 x 0.2
    advantages, returns = gae([0.0, 1.0], [0.5, 0.8], [True, True], 1.0, 0.5)
    assert advantages == pytest.approx([0.4, 0.2])
    assert returns == pytest.approx([0.9, 1.0])


def test_lambda_one_gives_whole_returns_and_lambda_zero_one_step() -> None:
    rewards, values = [0.25, -0.5, 2.0], [0.5, 1.0, -1.0]
    assert gae(rewards, values, [True] * 3, 1.0, 1.0)[1] == pytest.approx([1.75, 1.5, 2.0])
    assert gae(rewards, values, [True] * 3, 1.0, 0.0)[0] == pytest.approx([0.75, -2.5, 3.0])


def test_values_are_carried_over_masked_tokens() -> None:
    mask = [True, False, False, True]
    advantages, returns = gae([0.0, 9.0, 0.0, 1.0], [0.5, 70.0, -70.0, 0.8], mask, 0.9, 0.95)
    # As if the two masked tokens were not there; the reward that fell on them belongs to the token before.
    without = gae([9.0, 1.0], [0.5, 0.8], [True, True], 0.9, 0.95)
    assert advantages == [without[0][0], 0.0, 0.0, without[0][1]]
    assert returns == [without[1][0], 0.0, 0.0, without[1][1]]


def test_lists_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rewards, 1 values and 2 mask entries must match"):
        gae([0.0, 1.0], [0.5], [True, True], 1.0, 1.0)


def test_nothing_gives_nothing() -> None:
    assert gae([], [], [], 1.0, 0.95) == ([], [])
    assert gae([1.0], [2.0], [False], 1.0, 0.95) == ([0.0], [0.0])
    assert whiten([], []) == []


def test_whitened_advantages_have_mean_zero_and_unbiased_variance_one() -> None:
    rows = whiten([[1.0, 5.0, 99.0], [2.0]], [[True, True, False], [True]])
    trained = [rows[0][0], rows[0][1], rows[1][0]]
    assert math.fsum(trained) == pytest.approx(0, abs=1e-12)
    assert math.fsum(a * a for a in trained) / 2 == pytest.approx(1)
    assert rows[0][2] == 0.0


@pytest.mark.parametrize("row", [[0.3], [0.1 + 0.2, 0.3, 0.3], [1e9, 1e9]])
def test_advantages_without_variance_whiten_to_zero(row: list[float]) -> None:
    assert whiten([row], [[True] * len(row)]) == [[0.0] * len(row)]


# ---------------------------------------------------------------- bounds
@pytest.mark.parametrize("length", [1, 2, 7])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.9, 0.0)])
def test_agreeing_signs_reach_the_bound(length: int, gamma: float, lam: float) -> None:
    values = [-3.0] + [3.0] * (length - 1)
    advantages, _ = gae([2.0] * length, values, [True] * length, gamma, lam)
    bound = gae_bound(length, gamma, lam, max_reward=2.0, max_value=3.0)
    assert advantages[0] == pytest.approx(bound, rel=1e-12)


@settings(deadline=None, max_examples=60)
@given(
    tokens=st.lists(st.tuples(st.floats(-2, 2), st.floats(-3, 3)), min_size=1, max_size=10),
    gamma=st.sampled_from([0.9, 1.0]),
    lam=shares,
)
def test_the_bound_is_never_exceeded(tokens: list[tuple[float, float]], gamma: float, lam: float) -> None:
    rewards, values = [reward for reward, _ in tokens], [value for _, value in tokens]
    advantages, _ = gae(rewards, values, [True] * len(tokens), gamma, lam)
    bound = gae_bound(len(tokens), gamma, lam, max_reward=2.0, max_value=3.0)
    assert max(map(abs, advantages)) <= bound * (1 + 1e-12)
    whitened = whiten([advantages], [[True] * len(tokens)])[0]
    assert max(map(abs, whitened)) <= whitened_bound(len(tokens)) * (1 + 1e-8)


def test_one_outlier_reaches_the_whitened_bound() -> None:
    row = [1.0] + [0.0] * 99
    assert whiten([row], [[True] * 100])[0][0] == pytest.approx(whitened_bound(100), rel=1e-12)
    assert whitened_bound(1) == gae_bound(0, 1.0, 1.0, max_reward=1.0, max_value=1.0) == 0.0


BOUND_MUTATIONS = [
    ("gae_bound", "gamma * (1 - lam) *", "gamma * lam *"),
    ("whitened_bound", "(num_tokens - 1)", "num_tokens"),
]


@pytest.mark.parametrize(("function", "original", "mutated"), BOUND_MUTATIONS)
def test_a_mutated_bound_is_not_reached(function: str, original: str, mutated: str) -> None:
    wrong = mutant(module, function, original, mutated)
    advantages, _ = gae([2.0] * 4, [-3.0, 3.0, 3.0, 3.0], [True] * 4, 1.0, 0.9)
    found = (wrong.gae_bound(4, 1.0, 0.9, max_reward=2.0, max_value=3.0), wrong.whitened_bound(4))
    assert found != pytest.approx((advantages[0], 1.5), rel=1e-6)
