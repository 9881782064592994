"""From parts to rewards: clips, gates, weights, normalisation, and what rewards can be at most."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_engine.reward.combining import Rule, bounds, combine, count, normalized
from grpo_engine.types import Completion, Group, Prompt, RewardPart, Rollout

NOTHING = Completion([], "", "stop", [], [])
VALUES = st.none() | st.floats(-10, 10)


def group_of(*rows: list[float | None], weights: list[float] | None = None) -> Group:
    """One completion a row; parts a, b, c."""
    weights = weights or [1.0] * 3
    rollouts = [
        Rollout(NOTHING, [RewardPart(n, v, w) for n, v, w in zip("abc", row, weights, strict=False)], None)
        for row in rows
    ]
    return Group("1-0", Prompt("p", 0, "", [], {}), rollouts)


def rewards(groups: list[Group]) -> list[list[float | None]]:
    return [[rollout.reward for rollout in group.rollouts] for group in groups]


def shaped(groups: list[Group]) -> list[float | None]:
    return [rollout.shaped_reward for group in groups for rollout in group.rollouts]


def counted(values: list[float | None], *rules: Rule) -> list[float | None]:
    return count([RewardPart(rule.name, value, 1.0) for rule, value in zip(rules, values, strict=True)], rules)


def test_the_reward_is_the_weighted_sum_of_the_parts_that_judged() -> None:
    groups = combine(
        [group_of([1.0, 0.5], [None, 1.0], [None, None], weights=[5.0, -0.2])], [Rule("a"), Rule("b")], None
    )
    assert rewards(groups) == [[4.9, -0.2, None]]
    assert shaped(groups) == [None] * 3


def test_a_part_counts_as_nothing_where_its_gate_is_shut() -> None:
    rules = Rule("a", gated_by="b", gate_min=0.5), Rule("b")
    assert counted([1.0, 0.4], *rules) == [0.0, 0.4]
    assert counted([1.0, 0.5], *rules) == [1.0, 0.5]


def test_a_gate_that_abstained_lets_everything_through_and_an_abstention_stays_one() -> None:
    rules = Rule("a", gated_by="b"), Rule("b")
    assert counted([1.0, None], *rules) == [1.0, None]
    assert counted([None, 0.0], *rules) == [None, 0.0]


def test_a_gate_that_is_shut_itself_shuts_what_it_gates() -> None:
    rules = Rule("a", gated_by="b"), Rule("b", gated_by="c"), Rule("c")
    assert counted([1.0, 1.0, 0.0], *rules) == [0.0, 0.0, 0.0]


def test_values_are_clipped_before_they_are_gated() -> None:
    rules = Rule("a", clip=(0.2, 0.8), gated_by="b"), Rule("b")
    assert [counted([value, 1.0], *rules)[0] for value in (-3.0, 0.5, 3.0)] == [0.2, 0.5, 0.8]
    assert counted([0.5, 0.0], *rules)[0] == 0.0


def test_the_whole_reward_is_clipped_too() -> None:
    groups = combine([group_of([1.0, 1.0], [-9.0, 0.0])], [Rule("a"), Rule("b")], (-1.0, 1.5))
    assert rewards(groups) == [[1.5, -1.0]]
    assert shaped(combine([group_of([1.0], [0.0])], [Rule("a", normalize="group")], (-0.5, 0.25))) == [0.25, -0.5]


def test_parts_remember_what_they_counted_as() -> None:
    [group] = combine([group_of([7.0, 0.0])], [Rule("a", clip=(0.0, 1.0)), Rule("b", gated_by="a")], None)
    assert [(part.value, part.counted) for part in group.rollouts[0].parts] == [(7.0, 1.0), (0.0, 0.0)]


def test_a_part_may_be_normalised_in_its_group_or_in_the_batch() -> None:
    batch = [group_of([0.0, 1.0], [2.0, 1.0]), group_of([10.0, 1.0], [12.0, 1.0])]
    by_group = combine(batch, [Rule("a", normalize="group"), Rule("b")], None)
    assert shaped(by_group) == [0.0, 2.0, 0.0, 2.0]  # -1 and +1, and 1 of the other part
    assert rewards(by_group) == [[1.0, 3.0], [11.0, 13.0]]
    whole = shaped(combine(batch, [Rule("a", normalize="batch"), Rule("b")], None))
    assert [number for number in whole if number is not None] == pytest.approx(
        [1 - 6 / 26**0.5, 1 - 4 / 26**0.5, 1 + 4 / 26**0.5, 1 + 6 / 26**0.5]
    )


def test_a_completion_that_nobody_judged_has_no_normalised_reward_either() -> None:
    groups = combine([group_of([None], [1.0], [0.0])], [Rule("a", normalize="group")], None)
    assert shaped(groups) == [None, 1.0, -1.0]


def test_residue_of_equal_values_is_not_blown_up() -> None:
    assert normalized([0.3, 0.1 + 0.2, None]) == [0.0, 0.0, None]


@given(st.lists(VALUES, max_size=20))
def test_normalised_values_have_mean_0_keep_their_order_and_their_abstentions(values: list[float | None]) -> None:
    found = normalized(values)
    assert [value is None for value in found] == [value is None for value in values]
    known = [value for value in found if value is not None]
    assert sum(known) == pytest.approx(0, abs=1e-6)
    pairs = sorted((value, after) for value, after in zip(values, found, strict=True) if value is not None)
    assert all(first[1] <= second[1] for first, second in pairwise(pairs))


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(-5, 5), st.booleans()), min_size=1, max_size=3))
def test_no_reward_leaves_its_bounds(parts: list[tuple[float, float, bool]]) -> None:
    names = "abc"[: len(parts)]
    rules = [
        Rule(name, weight, gated_by="a" if gated and name != "a" else None, clip=(0.1, 0.9) if gated else None)
        for name, (_, weight, gated) in zip(names, parts, strict=True)
    ]
    row: list[float | None] = [value for value, *_ in parts]
    [[reward]] = rewards(combine([group_of(row, weights=[weight for _, weight, _ in parts])], rules, (-4.0, 4.0)))
    lowest, highest = bounds(rules, (-4.0, 4.0))
    assert reward is not None
    assert lowest - 1e-9 <= reward <= highest + 1e-9
