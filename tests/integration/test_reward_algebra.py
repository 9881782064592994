"""Answer accuracy where formulas are compared by math-verify and sympy."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from grpo_engine.config_rewards import AccuracyReward
from grpo_engine.reward.accuracy import gold_problem, metric
from tests.reward_cases import cases_of, completion, prompt

CASES = [case for case in cases_of("accuracy") if case.values[0].get("algebra")]


def value_of(text: str, gold: Any, question: str = "Q", **config: Any) -> float | None:
    [part] = metric(AccuracyReward(**config)).score([prompt(question, answer=gold)], [completion(text)])
    return part.value


@pytest.mark.parametrize("case", CASES)
def test_the_verdict_on_formulas(case: dict[str, Any]) -> None:
    found = value_of(case["text"], case["gold"], case.get("question", "Q"), **case.get("config", {}))
    assert found == case["value"]


def test_an_answer_that_repeats_the_question_is_none() -> None:
    asked = "Simplify $\\sqrt{12} + \\sqrt{27}$, please."
    assert value_of("\\sqrt{12}+\\sqrt{27}", "5\\sqrt{3}", asked) == 0
    assert value_of("3\\sqrt{3} + 2\\sqrt{3}", "5\\sqrt{3}", asked) == 1
    assert value_of("\\sqrt{12}+\\sqrt{27}", "\\sqrt{12}+\\sqrt{27}", asked) == 1


@pytest.mark.parametrize("gold", ["\\frac{1}{0}", "@@", "x^{2", "\\frac{1}{0} + x", "9^{9^{9}}", "99999999!"])
def test_a_gold_formula_that_cannot_be_read_is_an_error_of_the_dataset(gold: str) -> None:
    assert gold_problem(gold) is not None
    for answer in ("x", "5", "yes", "(x+1)^2", "1, 2"):
        assert value_of(answer, gold) is None


@pytest.mark.parametrize(
    "gold", ["x^2+1", "\\infty", "2\\sqrt{3}", "y = 2x", "\\{x, y\\}", "x \\ge 3", "2^{2^n}", "(x^2)^3"]
)
def test_a_gold_formula_that_can_be_read_has_no_problem(gold: str) -> None:
    assert gold_problem(gold) is None


def test_formulas_are_compared_in_any_thread() -> None:
    found: list[float | None] = []
    thread = threading.Thread(target=lambda: found.append(value_of("(x+1)^2", "x^2+2x+1")))
    thread.start()
    thread.join()
    assert found == [1.0]
