"""Logical consistency: the oracle table, properties, hostile texts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_engine.config_rewards import LogicalConsistencyReward
from grpo_engine.reward import logical_consistency
from grpo_engine.reward.logical_consistency import judge_text
from grpo_engine.reward.reasoning_quantities import agree, quantity
from tests.reward_cases import cases_of, completion, prompt


@pytest.mark.parametrize("case", cases_of("logical_consistency"))
def test_what_is_said_of_real_solutions(case: dict[str, Any]) -> None:
    said = judge_text(case["text"])
    assert said.value == case["value"], said
    assert case.get("says", "") in said.explanation
    assert len(said.explanation) > 10


def test_the_span_is_the_contradiction() -> None:
    text = "Solving gives x = 5. The width is therefore x = 7 metres."
    said = judge_text(text)
    assert said.span is not None
    assert text[slice(*said.span)].startswith("x = 7")


def test_the_answer_stands_where_the_config_says() -> None:
    text = "<think>The answer is 3.</think>1 + 1 = 2 and 4 + 1 = 5, so \\boxed{4} or <answer>5</answer>"
    metric = logical_consistency.metric(LogicalConsistencyReward(extract="boxed"))
    said = metric.judge(prompt(), completion(text))
    assert said.value == 0
    assert "states 3, but the final answer is 4" in said.explanation


def test_thinking_that_the_prompt_opened_holds_no_answer() -> None:
    metric = logical_consistency.metric(LogicalConsistencyReward())
    text = "3 + 4 = 7 and 7 + 1 = 8.\n#### 9"
    assert metric.judge(prompt("Question <think>"), completion(text)).value is None
    assert metric.judge(prompt("Question"), completion(text)).value == 0


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_only_another_answer_is_held_against_a_solution(concluded: int, answered: int) -> None:
    said = judge_text(f"<think>So the answer is {concluded:,}.</think>The answer is ${answered}.")
    assert said.value == (concluded == answered)


@pytest.mark.parametrize(
    ("text", "spelled"),
    [("$1,600.50", "1600.5"), ("007", "7"), ("-5", "-5"), ("\\frac{1}{2}", "0.5"), ("1/3", "1/3"), ("12\\%", "12%"),
     ("3/0", "3/0"), ("B", "B"), (".25", "0.25")],
)  # fmt: skip
def test_numbers_have_one_spelling(text: str, spelled: str) -> None:
    assert quantity(text) == spelled


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [("12", "12", True), ("12", "13", False), ("-5", "5", True), ("70.58", "70.6", True), ("70.58", "71", True),
     ("70.58", "70", False), ("0.12", "12%", True), ("1/3", "0.333", True), ("B", "C", False), ("1/3", "0.34", False)],
)  # fmt: skip
def test_numbers_agree_when_one_rounds_the_other(first: str, second: str, same: bool) -> None:
    assert agree(first, second) is same
