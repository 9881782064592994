"""Numbers as texts in one spelling, so that hundreds of them are compared in a millisecond."""

from __future__ import annotations

import math
import re
from collections.abc import Set
from fractions import Fraction

from grpo_engine.reward.reasoning_folding import fold, words_pattern

MAX_NUMBER = 40
# A digit and what follows it, or a point and its digits; written so that the engine can skip to the first of either.
_NUMBER = re.compile(r"[.0-9](?:(?<=[0-9])[0-9]*(?:,[0-9]{3})*(?:\.[0-9]+)?|(?<=\.)[0-9]+)")
_TEX_FRACTION = re.compile(r"\\[dt]?frac\{(-?[0-9]{1,12})\}\{([0-9]{1,12})\}")
_SLASHED = re.compile(r"([0-9][0-9]{0,11})\s?/\s?([0-9]{1,12})")
_FRACTION = re.compile(r"\\[dt]?frac\{(-?[0-9]{1,12})\}\{([0-9]{1,12})\}|([0-9]{1,12})\s?/\s?([0-9]{1,12})")
_NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_WORDS = {name: str(number) for number, name in enumerate(_NAMES)} | {
    "half": "0.5", "once": "1", "twice": "2", "dozen": "12", "none": "0", "nothing": "0", "no": "0",
}  # fmt: skip
_WORDS_OF = {
    number: re.compile(words_pattern([word for word, meant in _WORDS.items() if meant == number]))
    for number in set(_WORDS.values())
}
"""Number -> its words, to be held against folded text."""


def quantity(text: str) -> str:
    """A number in one spelling: "$1,600.50" and "1600.5" are the same; fractions become decimals where these end, and
    stay fractions otherwise; a percent sign stays. Anything else is returned as it is."""
    fraction = _FRACTION.search(text)
    if fraction is not None:
        top, bottom = (fraction[1], fraction[2]) if fraction[1] else (fraction[3], fraction[4])
        return _of_fraction(int(top), int(bottom), text)
    number = _NUMBER.search(text)
    if number is None:
        return text
    sign = "-" if text[: number.start()].strip(" $€£({").endswith(("-", "−")) else ""
    plain = sign + _plain(number.group())
    return plain + "%" if text.rstrip().endswith("%") else plain


def numbers_of(text: str) -> set[str]:
    """Every number of the text in one spelling, signs left out."""
    found = {
        number if number.isdecimal() and number[0] != "0" and len(number) <= MAX_NUMBER else _plain(number)
        for number in set(_NUMBER.findall(text))
    }
    for sign, pattern in (("/", _SLASHED), ("frac", _TEX_FRACTION)):
        if sign in text:
            found.update(_of_fraction(int(part[1]), int(part[2]), part[0]) for part in pattern.finditer(text))
    return found


def stands_in_words(text: str, number: str) -> bool:
    """Whether a number stands in words: "half an hour", "two"."""
    pattern = _WORDS_OF.get(number)
    return pattern is not None and pattern.search(fold(text)) is not None


def agree(first: str, second: str) -> bool:
    """Equal numbers, but for sign, percent sign and rounding to the digits that the shorter one shows."""
    one, other = first.strip("-%"), second.strip("-%")
    if one == other:
        return True
    if first[:1].isalpha() or second[:1].isalpha() or _far_apart(first, second):
        return False
    try:
        exact, shown = Fraction(one), Fraction(other)
    except (ValueError, ZeroDivisionError):
        return False
    if "%" in first + second and exact and shown / exact in (100, Fraction(1, 100)):
        return True
    digits = min(len(text.partition(".")[2]) if "/" not in text else 12 for text in (one, other))
    return (exact.denominator != 1 or shown.denominator != 1) and 2 * abs(exact - shown) * 10**digits <= 1


def agrees_with_any(value: str, numbers: Set[str]) -> bool:
    """Whether the value agrees with one of what `numbers_of` gives."""
    if value.strip("-%") in numbers:
        return True
    whole = value.strip("-").isdecimal()  # then other whole numbers differ
    return any(agree(number, value) for number in numbers if not (whole and number.isdecimal()))


def _far_apart(first: str, second: str) -> bool:
    """Whether two numbers differ by more than rounding explains, told at once; False where it takes exact numbers."""
    if "%" in first or "%" in second:
        return False
    try:
        one, other = _nearly(first), _nearly(second)
    except (ValueError, ZeroDivisionError):
        return False
    return abs(one - other) > 1 + 1e-9 * one


def _nearly(number: str) -> float:
    """Without sign. Raises ValueError or ZeroDivisionError for what is no number."""
    top, slash, bottom = number.strip("-").partition("/")
    return float(top) / float(bottom) if slash else float(top)


def _plain(number: str) -> str:
    if len(number) > MAX_NUMBER:
        return number[:MAX_NUMBER] + "…"
    whole, point, decimals = number.replace(",", "").partition(".")
    decimals = decimals.rstrip("0")
    return (whole.lstrip("0") or "0") + (point + decimals if decimals else "")


def _of_fraction(top: int, bottom: int, text: str) -> str:
    """`text` is what a fraction by 0 is called."""
    if not bottom:
        return text
    shared = math.gcd(top, bottom)
    top, bottom = top // shared, bottom // shared
    rest = bottom
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    if rest == 1 and top >= 0:
        return _plain(f"{top / bottom:.12f}")
    return str(top) if bottom == 1 else f"{top}/{bottom}"
