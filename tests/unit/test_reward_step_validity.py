"""Step validity: the oracle table, properties, hostile texts."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_engine.config_rewards import StepValidityReward
from grpo_engine.reward import step_validity
from grpo_engine.reward.reasoning_steps import find_steps, shown
from grpo_engine.reward.step_validity import judge_text
from tests.reward_cases import cases_of, completion, prompt

NUMBERS = st.integers(0, 9999)
SIGNS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
PIECES = st.lists(
    st.sampled_from(
        ["12", "3.5", "=", "+", "*", "/", " ", "x", "(", ")", "{", "}", "\\frac", "\\sqrt", "^", "%", "of", "is", "$",
         "<<", ">>", "\n", "about", "½", "²", "!", "\\\\", "&", "\0", "\u200f", "然后", "1,000", ".", "times", "and"]
    ),
    max_size=40,
)  # fmt: skip


@pytest.mark.parametrize("case", cases_of("step_validity"))
def test_what_is_said_of_real_steps(case: dict[str, Any]) -> None:
    said = judge_text(case["text"])
    assert said.value == (None if case["value"] is None else pytest.approx(case["value"], abs=1e-3)), said
    assert case.get("says", "") in said.explanation
    assert len(said.explanation) > 10


def test_the_span_is_the_first_wrong_step_or_all_from_first_to_last() -> None:
    text = "So 1 + 1 = 2, then 2 * 3 = 7 and 9 - 8 = 2."
    said = judge_text(text)
    assert said.span is not None
    assert text[slice(*said.span)] == "2 * 3 = 7"
    said = judge_text("So 1 + 1 = 2, then 2 * 3 = 6.")
    assert said.span == (3, 28)


def test_fewer_steps_than_asked_for_abstain() -> None:
    metric = step_validity.metric(StepValidityReward(min_steps=3))
    said = metric.judge(prompt(), completion("1 + 1 = 2 and 2 + 2 = 4"))
    assert (said.value, said.span) == (None, None)
    assert "only 2 of the 3 steps needed" in said.explanation


def test_the_metric_is_quick_enough_for_the_engine_itself_and_has_a_version() -> None:
    metric = step_validity.metric(StepValidityReward(weight=0.5))
    assert (metric.name, metric.weight, metric.slow) == ("step_validity", 0.5, False)
    assert metric.version.startswith("step_validity@")


@settings(max_examples=30)
@given(NUMBERS, NUMBERS, st.sampled_from(sorted(SIGNS)), st.sampled_from(["", " ", "  "]))
def test_a_right_sum_is_right_however_it_is_spaced(a: int, b: int, sign: str, space: str) -> None:
    result = SIGNS[sign](a, b)
    assert judge_text(f"Now {a}{space}{sign}{space}{b}{space}={space}{result}.").value == 1
    assert judge_text(f"We get {b} + {a} = {a + b} apples\nand {a} {sign} {b} = {result}.").value == 1


@settings(max_examples=30)
@given(NUMBERS, NUMBERS, st.integers(1, 500), st.sampled_from(sorted(SIGNS)))
def test_another_result_is_wrong_unless_it_reads_as_a_range(a: int, b: int, off: int, sign: str) -> None:
    assert judge_text(f"Now {a} {sign} {b} = {SIGNS[sign](a, b) + off}.").value == 0


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 99), st.booleans()), min_size=1, max_size=8))
def test_repeating_a_solution_changes_nothing(sums: list[tuple[int, int, bool]]) -> None:
    text = "\n".join(f"{a} + {b} = {a + b + (not right)}" for a, b, right in sums)
    once, twice = judge_text(text), judge_text(text + "\n" + text.replace("+", " + ").replace("=", "= "))
    assert once.value == twice.value


@settings(deadline=None, max_examples=50)
@given(PIECES)
def test_no_text_breaks_it(pieces: list[str]) -> None:
    said = judge_text("".join(pieces))
    assert said.value is None or 0 <= said.value <= 1
    assert (said.value is None) == (said.span is None)


def test_numbers_are_shown_as_people_write_them() -> None:
    assert [shown(Fraction(*pair)) for pair in ((10, 2), (5, 2), (10, 3), (-1, 8))] == ["5", "2.5", "10/3", "-0.125"]
    assert shown(Fraction(10**50)) == "a number of many digits"


def test_places_of_steps_lie_in_the_text_and_in_order() -> None:
    text = "a) 1 + 2 = 3\n\\[ \\frac{4}{2} = 2 \\]\n5 * 5 = 26"
    steps = find_steps(text)
    assert [text[step.start : step.end] for step in steps] == ["1 + 2 = 3", "\\frac{4}{2} = 2", "5 * 5 = 26"]
    assert [step.right for step in steps] == [True, True, False]
