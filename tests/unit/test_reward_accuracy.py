"""Answer accuracy without an algebra system: its oracle table, its properties, and what hostile answers earn."""

from __future__ import annotations

import json
from fractions import Fraction
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_engine.config_rewards import AccuracyReward, Extract
from grpo_engine.reward.accuracy import answers_equal, gold_problem, gold_texts, metric, shorten
from grpo_engine.reward.metric import Judgement, QuickJudge
from tests.reward_cases import cases_of, completion, prompt

CASES = cases_of("accuracy")
MEGABYTE = 1_000_000
WHOLE = st.integers(-(10**12), 10**12)


@cache
def quick_judge(**config: Any) -> QuickJudge:
    quick = metric(AccuracyReward(**config)).quick
    assert quick is not None
    return quick


def quickly(text: str, gold: Any, question: str = "Q", **config: Any) -> Judgement | None:
    return quick_judge(**config)(prompt(question, answer=gold), completion(text))


def value_of(text: str, gold: Any, **config: Any) -> float | None:
    said = quickly(text, gold, **config)
    assert said is not None, "nothing is left open"
    return said.value


@pytest.mark.parametrize("case", CASES)
def test_the_verdict_on_real_answers(case: dict[str, Any]) -> None:
    said = quickly(case["text"], case["gold"], case.get("question", "Q"), **case.get("config", {}))
    if case.get("algebra"):
        assert said is None, "only algebra can tell"
    else:
        assert said is not None
        assert said.value == case["value"], said.explanation


def test_the_table_is_large_enough() -> None:
    assert len(CASES) >= 60


# ---------------------------------------------------------------- what is said
def test_a_right_answer_names_its_span() -> None:
    said = quickly("<think>7+5=12</think>The answer is **632**.", "632")
    assert said == Judgement(1.0, "632 equals the gold answer 632.", (37, 40))


@pytest.mark.parametrize(
    ("text", "gold", "says"),
    [
        ("633", 632, "633 differs from the gold answer 632."),
        ("<think>633", "632", "The thinking was never closed with </think>, so there is no answer."),
        ("123+456", "579", "123+456 differs from the gold answer 579. It is not worked out to a number."),
        ("5 or 6", "5", "5 or 6 differs from the gold answer 5. It gives several values; the gold answer is one."),
        ("５", "5", "５ differs from the gold answer 5. U+FF15 is no ASCII digit."),
        ("5\u202e", "5", "5\ufffd differs from the gold answer 5. U+202E is an invisible or control character."),
        ("1", "\\frac{1}{", "The gold answer \\frac{1}{ cannot be compared: its braces do not match. That is an error "
         "of the dataset."),
        ("9", ["7", "8"], "9 differs from all 2 gold answers."),
    ],
)  # fmt: skip
def test_the_explanation_says_what_is_wrong(text: str, gold: Any, says: str) -> None:
    said = quickly(text, gold)
    assert said is not None
    assert said.explanation == says


def test_an_answer_that_fills_pages_is_shown_short() -> None:
    assert len(shorten("x" * MEGABYTE)) == 80


# ---------------------------------------------------------------- properties
@settings(max_examples=40)
@given(WHOLE, WHOLE)
def test_integers_are_equal_only_to_themselves(one: int, other: int) -> None:
    assert value_of(f"{one}", f"{other}") == float(one == other)
    assert value_of(f"{one:,}.0", f"{one}") == 1


@settings(max_examples=40)
@given(WHOLE, st.integers(1, 10**6), st.integers(1, 50))
def test_a_fraction_equals_its_multiples_and_no_other(top: int, bottom: int, factor: int) -> None:
    gold = f"\\frac{{{top}}}{{{bottom}}}"
    assert value_of(f"{top * factor}/{bottom * factor}", gold) == 1
    assert value_of(f"{top * factor + 1}/{bottom * factor}", gold) == 0
    assert value_of(f"{Fraction(top, bottom)}", gold) == 1


@settings(max_examples=40)
@given(st.one_of(WHOLE.map(str), st.sampled_from(["1/2", "x^2+1", "(3,4)", "\\{1,2\\}", "Paris", "B", "50%"])))
def test_dress_changes_no_verdict(answer: str) -> None:
    for dressed in (f"${answer}$", f" **{answer}** ", f"\\boxed{{{answer}}}", f"\\({answer}\\).", f"Answer: {answer}"):
        assert value_of(f"<think></think>{dressed}", answer) == 1, dressed


@settings(max_examples=40)
@given(st.text(max_size=80), st.sampled_from(["5", "1/2", "Paris", "B", "(1,2)", "\\{1,2\\}"]))
def test_any_text_gets_a_value_within_bounds(text: str, gold: str) -> None:
    said = quickly(text, gold)
    assert said is None or said.value in (0.0, 1.0)


@settings(max_examples=40)
@given(st.text(st.characters(exclude_categories=["Nd", "Cs"]), min_size=1, max_size=40))
def test_without_a_digit_nothing_equals_a_number(text: str) -> None:
    assert value_of(text, "7") == 0


# ---------------------------------------------------------------- hostile text
@pytest.mark.parametrize("extract", ["after_think", "boxed", "tag", "last_number", "whole"])
@pytest.mark.parametrize(
    "unit",
    ["9", "\\boxed{", "{", "1,", "111,", "\0", "answer is ", "answer: * ", "\u202e", "<think>", "</think>", "<answer>",
     "(", "-", "\\frac{", "９", "5. The answer is ", "\ud800"],
)  # fmt: skip
@pytest.mark.timeout(20)
def test_a_megabyte_of_anything_earns_nothing(unit: str, extract: Extract) -> None:
    assert value_of(unit * (MEGABYTE // len(unit)), "579", extract=extract) == 0


@pytest.mark.parametrize(
    "text", ["(" * 499 + "5" + ")" * 499, "\\text{" * 160 + "}" * 160, "1 and " * 160, "\\pm" * 300]
)
@pytest.mark.parametrize("gold", ["579", "\\{1,2\\}", "(1,2)"])
def test_deep_and_wide_answers_are_no_answers(text: str, gold: str) -> None:
    said = quickly(text, gold)
    assert said is None or said.value == 0


# ---------------------------------------------------------------- number and text
@pytest.mark.parametrize(
    ("answer", "gold"),
    [("632", "632"), (" 632\n", "632"), ("632.0", "632"), ("+632", "632"), ("0632", "632"), ("1,234", "1234"),
     ("\u22125", "-5"), (".5", "0.50"), ("1e3", "1000"), ("x+1", "x+1"), ("5.", "5")],
)  # fmt: skip
def test_equal_as_decimal_numbers_or_as_text(answer: str, gold: str) -> None:
    assert answers_equal(answer, gold)


@pytest.mark.parametrize(
    ("answer", "gold"),
    [("633", "632"), ("632.0001", "632"), ("632 apples", "632"), ("1/2", "0.5"), ("Yes", "yes"), ("", "0"),
     ("nan", "NaN"), ("6,32", "632"), ("6 32", "632"), ("0x10", "16"), ("６３２", "632"), ("9" * 5000, "1"),
     ("12345678901234567891", "12345678901234567890")],
)  # fmt: skip
def test_different_as_decimal_numbers_and_as_text(answer: str, gold: str) -> None:
    assert not answers_equal(answer, gold)


def test_the_three_ways_to_compare() -> None:
    ways: list[Any] = ["math", "number", "text"]
    found = [[metric(AccuracyReward(compare=way)).score([prompt("Q", answer="0.5")], [completion(text)])[0].value
              for way in ways] for text in ("1/2", ".50", "0.5")]  # fmt: skip
    assert found == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert [metric(AccuracyReward(compare=way)).slow for way in ways] == [True, False, False]


def test_numbers_within_the_tolerance_are_equal() -> None:
    assert answers_equal("99", "100", 0.01)
    assert not answers_equal("98.9", "100", 0.01)


# ---------------------------------------------------------------- gold answers
@pytest.mark.parametrize(
    ("column", "texts"),
    [("5", ["5"]), (5, ["5"]), (0.5, ["0.5"]), (["1/2", 0.5, ""], ["1/2", "0.5"]), ("a\n#### 1,234", ["1,234"]),
     (None, []), ("", []), (True, []), ({"a": 1}, []), (float("inf"), []), ([], [])],
)  # fmt: skip
def test_the_gold_answers_of_a_column(column: Any, texts: list[str]) -> None:
    assert gold_texts(column) == texts


@pytest.mark.parametrize(
    ("gold", "says"),
    [(None, "no gold answer"), ([], "no gold answer"), ("\\frac{1}{", "braces"), ("9^{9^{9}}", "power of powers"),
     (["5", "\\sqrt{"], "braces"), ("x" * 2000, "longer")],
)  # fmt: skip
def test_a_gold_answer_that_cannot_be_read_is_named(gold: Any, says: str) -> None:
    problem = gold_problem(gold)
    assert problem is not None
    assert says in problem


@pytest.mark.parametrize("gold", ["5", "1/2", "Paris", "B", "(3,4)", "\\{1,2\\}", "50%", ["7", "8"], 3])
def test_a_gold_answer_that_can_be_read_has_no_problem(gold: Any) -> None:
    assert gold_problem(gold) is None
    assert json.dumps(gold_texts(gold))


def test_text_is_never_a_problem_where_text_is_compared() -> None:
    assert gold_problem("\\frac{1}{", "text") is None
    assert gold_problem("\\frac{1}{", "number") is None


def test_the_version_does_not_depend_on_the_config() -> None:
    one, other = metric(AccuracyReward(weight=2, extract="boxed")), metric(AccuracyReward(compare="number"))
    assert one.version == other.version
    assert one.version.startswith("accuracy@")
