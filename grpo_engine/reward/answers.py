r"""Whether two answers are equal: what can be decided exactly and at once, without an algebra system.

An answer is read as one of: a choice ("B", "(B)", "B."), a number with unit, several values (set, list, tuple or
interval, union), words, or a formula. Rules that are choices, not mathematics:

- A gold answer that is a plain number wants a plain number: "123+456" and "2^{10}" are still to be worked out.
- A single gold answer wants a single answer: "5 or 6" is no 5.
- {1,2} has no order and no duplicates; "1, 2" has no order; (1,2) and [1,2] have both, and the brackets matter for two
  values (an interval, or a point).
- "x = 5" equals 5; "x = 5" and "y = 5" differ.
- Words are compared without case; formulas by algebra (answers_algebra.py), which this module leaves open.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from grpo_engine.reward.answers_numbers import Number, equal_quantities, read_number
from grpo_engine.reward.answers_text import closing, normalise, split_top

MAX_VALUES = 40
"""More values than this are compared as text only."""
MAX_PARENTHESES = 20
"""Pairs around a value that are taken off."""

_CHOICE = re.compile(
    r"(?:(?:the )?(?:correct |right )?(?:option|choice|answer)(?: is)?:?\s*)?"
    r"(?:[(\[](?P<a>[A-J])[)\]]|(?P<b>[A-J])(?=\s*$|[.):]))[.):]*\s*(?P<rest>.*)",
    re.IGNORECASE | re.DOTALL,
)
_OTHER_CHOICE = re.compile(r"[(\[][A-J][)\]]|(?<![A-Za-z])[A-J][.):]|\b(?:or|and)\b|;|(?<![A-Za-z])[B-HJ](?![A-Za-z])")
_NAMED = re.compile(r"(?P<name>\\?[a-zA-Z]+(?:_\{?\w{1,8}\}?)?(?:\([a-z](?:,[a-z])*\))?)\s*(?:=|\\in(?![a-zA-Z]))\s*")
_NUMERAL = re.compile(r"\{?[0-9A-Fa-f]+\}?_\{?[0-9]+\}?|[0-9.]+(?:\s?:\s?[0-9.]+)+(?: ?[aApP]\.?[mM])?")
_APPROXIMATE = re.compile(r"(?:\\approx|\\sim(?:eq)?|about|approximately|roughly)(?![a-zA-Z])\s*")
_OTHER_NAMES = {
    r"+\infty": r"\infty", "oo": r"\infty", "inf": r"\infty", "infinity": r"\infty", "-oo": r"-\infty",
    "-inf": r"-\infty", "-infinity": r"-\infty", r"\varnothing": r"\emptyset", r"\{\}": r"\emptyset",
}  # fmt: skip


class Verdict(NamedTuple):
    """`equal` is None where only algebra can tell."""

    equal: bool | None
    reason: str = ""
    """Why the answer is wrong, where more than a difference is to be said; a sentence."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A text and what it was read as; none of the fields set: a formula."""

    text: str
    """Normalised, without a leading `x =`."""
    name: str = ""
    """The `x` of `x = 5`."""
    choice: str = ""
    number: Number | None = None
    brackets: str = ""
    """ "{}" set, "," list, "U" union, else the two characters around a tuple or interval; empty: a single value."""
    values: tuple[str, ...] = ()
    is_words: bool = False

    @property
    def is_formula(self) -> bool:
        return not (self.choice or self.number or self.brackets or self.is_words)


Algebra = Callable[[Reading, Reading], Verdict]


def read(text: str) -> Reading:
    """What an answer says. `text` as extracted, of reasonable length."""
    text = normalise(text)
    if choice := _read_choice(text):
        return Reading(text, choice=choice)
    text = text[match.end() :] if (match := _APPROXIMATE.match(text)) else text
    name = ""
    if (match := _NAMED.match(text)) and not re.search(r"=|\\[lg]e(?![a-z])|[<>]", text[match.end() :]):
        name, text = match["name"], text[match.end() :]
    text = _without_parentheses(text)
    text = _OTHER_NAMES.get(text, text)
    if number := read_number(text):
        return Reading(text, name, number=number)
    brackets, values = _read_values(text)
    if brackets:
        return Reading(text, name, brackets=brackets, values=tuple(values))
    return Reading(text, name, is_words=_are_words(text))


def _without_parentheses(text: str) -> str:
    """What stands in parentheses around a single value."""
    for _ in range(MAX_PARENTHESES):
        is_enclosed = text[:1] + text[-1:] in ("()", "{}") and closing(text, 0) == len(text) - 1
        if not is_enclosed or len(split_top(text[1:-1])) != 1:
            break
        text = text[1:-1].strip()
    return text


def _read_choice(text: str) -> str:
    match = _CHOICE.fullmatch(text)
    is_symbol = len(text) == 1 and text.islower()
    if match is None or is_symbol or _OTHER_CHOICE.search(match["rest"]):
        return ""
    return (match["a"] or match["b"]).upper()


def _read_values(text: str) -> tuple[str, list[str]]:
    """Brackets and the values in them; brackets are empty for a single value."""
    if re.search(r"\\cup(?![a-zA-Z])", text) and len(parts := split_top(text)) > 1:
        return "U", parts
    if r"\pm" in text and text.count(r"\pm") == 1 and "," not in text:
        return ",", [text.replace(r"\pm", sign).strip() for sign in "+-"]
    if text.startswith(r"\{") and text.endswith(r"\}") and closing(text, 1) == len(text) - 1:
        return "{}", split_top(text[2:-2])
    in_brackets = text[:1] in ("(", "[", "{") and text[-1:] in (")", "]", "}") and closing(text, 0) == len(text) - 1
    if in_brackets and len(values := split_top(text[1:-1])) > 1:
        return text[0] + text[-1], values
    if r"\begin" not in text and len(parts := split_top(text)) > 1:
        return ",", parts
    return "", []


def _are_words(text: str) -> bool:
    """Letters and their punctuation, at least two of them in a row; and what has digits without being calculated:
    ratios 3:4, times, numerals of other bases."""
    if _NUMERAL.fullmatch(text):
        return True
    return not re.search(r"[\\^_=+*/<>{}()\[\]|0-9]", text) and bool(re.search(r"[^\W\d_]{2}", text))


# ---------------------------------------------------------------- comparing
def compare(answer: Reading, gold: Reading, tolerance: float = 0.0, algebra: Algebra | None = None) -> Verdict:
    """Whether `answer` says what `gold` says; equal is None where a formula must be compared and `algebra` is None."""
    if _plain(answer.text) == _plain(gold.text) and (answer.name == gold.name or not (answer.name and gold.name)):
        return Verdict(True)
    if answer.name and gold.name and answer.name != gold.name:
        return Verdict(False, f"It is a value of {answer.name}, not of {gold.name}.")
    if gold.choice:
        return Verdict(gold.choice in (answer.choice, answer.text.upper()))
    if gold.number:
        return _against_number(answer, gold.number, tolerance)
    if gold.brackets and answer.brackets:
        return _compare_values(answer, gold, tolerance, algebra)
    if gold.brackets in ("{}", ",") and not answer.is_formula:
        return _against_one_of_many(answer, gold, tolerance, algebra)
    return _against_formula(answer, gold, algebra)


def _against_one_of_many(answer: Reading, gold: Reading, tolerance: float, algebra: Algebra | None) -> Verdict:
    if len(gold.values) == 1:
        return compare(answer, read(gold.values[0]), tolerance, algebra)
    return Verdict(False, f"It is one value; the gold answer has {len(gold.values)}.")


def _plain(text: str) -> str:
    """For comparing text: words without case; signs without braces around one of them and without white space, but for
    that between digits or letters."""
    if _are_words(text) and not _NUMERAL.fullmatch(text):
        return text.casefold()
    text = re.sub(r"\s+(?![0-9a-zA-Z.,])|(?<![0-9a-zA-Z.,])\s+", "", text)
    return re.sub(r"\{([0-9a-zA-Z])\}", r"\1", text)


def _against_number(answer: Reading, gold: Number, tolerance: float) -> Verdict:
    if answer.number:
        return Verdict(equal_quantities(answer.number, gold, tolerance))
    if answer.brackets == "{}" and len(answer.values) == 1:
        return _against_number(read(answer.values[0]), gold, tolerance)
    if answer.brackets:
        return Verdict(False, "It gives several values; the gold answer is one.")
    if answer.choice or answer.is_words:
        return Verdict(False)
    last = re.split(r"(?<![<>!])=(?!=)", answer.text)[-1].strip()
    if last != answer.text and (number := read_number(last)):
        return Verdict(equal_quantities(number, gold, tolerance))
    return Verdict(False, "It is not worked out to a number.")


def _against_formula(answer: Reading, gold: Reading, algebra: Algebra | None) -> Verdict:
    """Algebra decides, an interval against inequalities included. It also says whether a gold formula can be read at
    all, so that even an obviously different answer waits for it."""
    if algebra:
        return algebra(answer, gold)
    return Verdict(None) if gold.is_formula else differs_in_form(answer, gold) or Verdict(None)


def differs_in_form(answer: Reading, gold: Reading) -> Verdict | None:
    """Words equal nothing but words, and several values no single formula; None when form decides nothing."""
    if answer.choice or ((gold.is_words or answer.is_words) and not _may_be_product(answer, gold)):
        return Verdict(False)
    if answer.brackets in (",", "U") and not gold.brackets:
        return Verdict(False, "It gives several values; the gold answer is one.")
    return None


def _may_be_product(answer: Reading, gold: Reading) -> bool:
    """Whether the one side that is words can be a product such as xy."""
    if answer.is_words and gold.is_words:
        return False
    words = answer.text if answer.is_words else gold.text
    return re.fullmatch(r"[a-zA-Z]{2,3}", words) is not None


def _compare_values(answer: Reading, gold: Reading, tolerance: float, algebra: Algebra | None) -> Verdict:
    if max(len(answer.values), len(gold.values)) > MAX_VALUES:
        return Verdict(False, f"More than {MAX_VALUES} values are compared as text only.")
    ours, theirs = [read(value) for value in answer.values], [read(value) for value in gold.values]

    def same(left: Reading, right: Reading) -> bool | None:
        return compare(left, right, tolerance, algebra).equal

    unordered = {"{}", ",", "U"}
    if gold.brackets in unordered and answer.brackets in unordered:
        if "U" in (gold.brackets, answer.brackets) and gold.brackets != answer.brackets:
            return Verdict(False)
        if "{}" in (gold.brackets, answer.brackets):
            ours, theirs = _distinct(ours, same), _distinct(theirs, same)
            if algebra is None and any(value.is_formula for value in [*ours, *theirs]) and len(ours) != len(theirs):
                return Verdict(None)  # algebra may find two of them equal
        return _pair_up(ours, theirs, same)
    if not _brackets_agree(answer, gold):
        return Verdict(False, "The brackets differ.")
    if len(ours) != len(theirs):
        return Verdict(False, _counted(ours, theirs))
    return _all([same(left, right) for left, right in zip(ours, theirs, strict=True)])


def _brackets_agree(answer: Reading, gold: Reading) -> bool:
    """Two values: (1,2), [1,2) and [1,2] are different things. A list without brackets may stand for a tuple; more than
    two values are a tuple in whatever brackets."""
    if "{}" in (answer.brackets, gold.brackets) or "U" in (answer.brackets, gold.brackets):
        return False
    if len(gold.values) > 2 or answer.brackets == gold.brackets:
        return True
    return "," in (answer.brackets, gold.brackets) and "()" in (answer.brackets, gold.brackets)


def _distinct(readings: Sequence[Reading], same: Callable[[Reading, Reading], bool | None]) -> list[Reading]:
    """Without what is surely a repetition."""
    kept: list[Reading] = []
    for reading in readings:
        if not any(_plain(other.text) == _plain(reading.text) or same(reading, other) for other in kept):
            kept.append(reading)
    return kept


def _pair_up(
    ours: Sequence[Reading], theirs: Sequence[Reading], same: Callable[[Reading, Reading], bool | None]
) -> Verdict:
    """Each of ours with one of theirs. A pair that is open makes the whole open unless the count decides."""
    if len(ours) != len(theirs):
        return Verdict(False, _counted(ours, theirs))
    left, is_open = list(theirs), False
    for reading in ours:
        verdicts = [same(reading, other) for other in left]
        if True in verdicts:
            left.pop(verdicts.index(True))
        elif None in verdicts:
            is_open = True
        else:
            return Verdict(False)
    return Verdict(None if is_open else True)


def _counted(ours: Sequence[Reading], theirs: Sequence[Reading]) -> str:
    return f"It gives {len(ours)} values; the gold answer has {len(theirs)}."


def _all(verdicts: Sequence[bool | None]) -> Verdict:
    if False in verdicts:
        return Verdict(False)
    return Verdict(None if None in verdicts else True)
