"""Patterns over folded text find what patterns that ignore case find, and numbers are compared as exactly as before."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_engine.reward import reasoning_claims, reasoning_conclusion, reasoning_quantities, reasoning_variables
from grpo_engine.reward.logical_consistency import judge_text
from grpo_engine.reward.reasoning_folding import fold, matches_from, words_pattern
from grpo_engine.reward.reasoning_quantities import agree, agrees_with_any, numbers_of, quantity, stands_in_words

EVERY = "".join(map(chr, (*range(0xD800), *range(0xE000, 0x110000))))
CASED = "".join(sign for sign in EVERY if sign.lower() != sign or sign.upper() != sign)
FOLDED = [
    reasoning_conclusion._MARK, reasoning_conclusion._CONCLUDING, reasoning_conclusion._TAKEN_BACK,
    reasoning_claims._CLAIM, reasoning_claims._HEDGED, reasoning_claims._CORRECTED, reasoning_claims._LEAD,
    reasoning_variables._ANEW, *reasoning_quantities._WORDS_OF.values(),
]  # fmt: skip
LETTERS = sorted({sign for pattern in FOLDED for sign in pattern.pattern if sign.islower()})
BITS = ["The answer is ", "ANSWER: ", "an\u017fwer is 3", "\\Boxed {", "\\boxed{", "####", "# ", "Réponse: ",
        "ОТВЕТ: ", "\u1c82твет: ", "答案是", "it IS even", "is \u0130nvalid", "isn't prime", "are never an odd",
        "this is 3", "7", " ", ".", "\n", "x", "_", "Σ", "İ"]  # fmt: skip
TEXTS = st.lists(st.sampled_from(BITS), max_size=12).map("".join)


def test_folding_keeps_every_character_in_its_place() -> None:
    folded = fold(EVERY)
    assert len(folded) == len(EVERY)
    assert all(len(fold(sign)) == 1 for sign in EVERY)
    for kind in (r"\w", r"\s", "[0-9]"):
        assert [m.start() for m in re.finditer(kind, folded)] == [m.start() for m in re.finditer(kind, EVERY)]


@pytest.mark.parametrize("letter", LETTERS)
def test_what_ignoring_case_takes_for_a_letter_folds_to_it(letter: str) -> None:
    ignoring = [match.start() for match in re.finditer(letter, CASED, re.IGNORECASE)]
    assert [match.start() for match in re.finditer(letter, fold(CASED))] == ignoring


@settings(max_examples=200)
@given(text=TEXTS, start=st.integers(0, 5), cut=st.integers(0, 5))
def test_matches_are_found_from_their_beginnings(text: str, start: int, cut: int) -> None:
    end = max(0, len(text) - cut)
    for pattern, beginnings in (
        (reasoning_conclusion._MARK, reasoning_conclusion._MARKS),
        (reasoning_claims._CLAIM, reasoning_claims._CLAIMS),
    ):
        found = [match.span() for match in matches_from(pattern, beginnings, fold(text), start, end)]
        ignoring = re.compile(pattern.pattern, re.IGNORECASE)
        assert found == [match.span() for match in ignoring.finditer(text, start, end)]


@settings(max_examples=100)
@given(st.text(alphabet="onetw_ -o1é", max_size=30))
def test_words_are_whole_words(text: str) -> None:
    words = ["one", "two", "no", "none"]
    expected = [match.span() for match in re.finditer(rf"\b(?:{'|'.join(words)})\b", text)]
    assert [match.span() for match in re.finditer(words_pattern(words), text)] == expected


# ---------------------------------------------------------------- numbers
NUMERALS = st.lists(
    st.sampled_from(["1", "23", "007", "1,000", "4.50", ".5", "3/4", "2 / 6", "8/0", "5.", "1/2/3", "\\frac{1}{4}",
                     "\\dfrac{-3}{6}", "\\frac{2}{0}", "9" * 41, "1" * 14 + "/7", ",", "/", ".", " ", "x"]),
    max_size=8,
).map("".join)  # fmt: skip


@settings(max_examples=200)
@given(NUMERALS)
def test_every_number_of_a_text_is_read(text: str) -> None:
    plain = re.findall(r"[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?|\.[0-9]+", text)
    fractions = reasoning_quantities._FRACTION.finditer(text)
    assert numbers_of(text) == {quantity(number) for number in plain} | {quantity(match[0]) for match in fractions}


def exactly(first: str, second: str) -> bool:
    """The rule of `agree` for numbers without signs, by exact arithmetic alone."""
    one, other = Fraction(first), Fraction(second)
    digits = min(12 if "/" in text else len(text.partition(".")[2]) for text in (first, second))
    return one == other or (one.denominator * other.denominator != 1 and 2 * abs(one - other) * 10**digits <= 1)


@settings(max_examples=300)
@given(
    near=st.integers(0, 10**9), offset=st.integers(-3, 3), first=st.sampled_from(["", ".5", ".25", ".333", "/3", "/7"]),
    second=st.sampled_from(["", ".5", ".49", ".3334", "/3"]),
)  # fmt: skip
def test_agreement_is_exact(near: int, offset: int, first: str, second: str) -> None:
    one, other = quantity(f"{near}{first}"), quantity(f"{max(0, near + offset)}{second}")
    assert agree(one, other) is exactly(one, other)
    assert agrees_with_any(one, {other, "1" + "0" * 12}) is exactly(one, other)


@pytest.mark.parametrize(
    ("value", "numbers", "agrees"),
    [("12%", {"0.12"}, True), ("1200%", {"12"}, True), ("-7", {"7"}, True), ("7", {"70"}, False),
     ("13", {"12.5"}, True), ("12.5", {"13"}, True), ("2", {"3/0"}, False), ("3/0", {"3/0"}, True), ("5", set(), False),
     ("5", {"9" * 40 + "…"}, False)],
)  # fmt: skip
def test_a_value_agrees_with_one_of_many(value: str, numbers: set[str], agrees: bool) -> None:
    assert agrees_with_any(value, numbers) is agrees


@pytest.mark.parametrize(
    ("text", "number", "stands"),
    [("TWO of them", "2", True), ("Twice.", "2", True), ("often", "10", False), ("ten_", "10", False),
     ("half an hour", "0.5", True), ("a dozen", "12", True), ("two", "3", False), ("forty", "40", False)],
)  # fmt: skip
def test_numbers_stand_in_words(text: str, number: str, stands: bool) -> None:
    assert stands_in_words(text, number) is stands


def test_a_number_in_words_with_other_forms_of_letters_is_read() -> None:
    said = judge_text("<think>1 + 2 = 3 and 2 + 3 = 5, and one more makes \u017fix.</think>6")
    assert said.value == 1


# ---------------------------------------------------------------- variables
@pytest.mark.parametrize(
    ("text", "found"),
    [("x = 5", {"x": ("5", 0, 5)}), ("so (N1= 7)", {"N1": ("7", 4, 9)}), ("x_{ab} equals 3", {"x_ab": ("3", 0, 15)}),
     ("$y$ &= 2", {}), ("y &= 10 + 5 = 15 apples", {"y": ("15", 0, 16)}), ("ax = 5", {}), ("2 + x = 5", {}),
     ("a = b = 3", {"a": ("3", 0, 9)}), ("\nz = \t4. So", {"z": ("4", 1, 7)}), ("x =", {}),
     ("x = 5 so y", {"x": ("5", 0, 5)})],
)  # fmt: skip
def test_the_values_that_names_are_given(text: str, found: dict[str, tuple[str, int, int]]) -> None:
    assert {name: values[0] for name, values in reasoning_variables._values_of_names(text).items()} == found


@pytest.mark.parametrize("more", ["x^2 = 25.", "x² is 25.", "The roots are here.", "Both solutions hold.", "x \\in S."])
def test_a_variable_that_may_have_several_values_is_left_alone(more: str) -> None:
    text = "Solving gives x = 5. The width is x = 7 metres. "
    assert judge_text(text).value == 0
    assert judge_text(text + more).value != 0
