"""Numbers as texts in one spelling, so that hundreds of them are compared in a millisecond."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_NUMBER = 40
_NUMBER = re.compile(r"[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?|\.[0-9]+")
_FRACTION = re.compile(r"\\[dt]?frac\{(-?[0-9]{1,12})\}\{([0-9]{1,12})\}|([0-9]{1,12})\s?/\s?([0-9]{1,12})")
_NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_WORDS = {name: str(number) for number, name in enumerate(_NAMES)} | {
    "half": "0.5", "once": "1", "twice": "2", "dozen": "12", "none": "0", "nothing": "0", "no": "0",
}  # fmt: skip
_WORD = re.compile(r"\b(?:" + "|".join(_WORDS) + r")\b", re.IGNORECASE)


def quantity(text: str) -> str:
    """A number in one spelling: "$1,600.50" and "1600.5" are the same; fractions become decimals where these end, and
    stay fractions otherwise; a percent sign stays. Anything else is returned as it is."""
    fraction = _FRACTION.search(text)
    if fraction is not None:
        top, bottom = (fraction[1], fraction[2]) if fraction[1] else (fraction[3], fraction[4])
        return _of_fraction(int(top), int(bottom)) if int(bottom) else text
    number = _NUMBER.search(text)
    if number is None:
        return text
    sign = "-" if text[: number.start()].strip(" $€£({").endswith(("-", "−")) else ""
    plain = sign + _plain(number.group())
    return plain + "%" if text.rstrip().endswith("%") else plain


def numbers_of(text: str) -> set[str]:
    """Every number of the text in one spelling, signs left out."""
    found = {_plain(number) for number in _NUMBER.findall(text)}
    if "/" in text or "frac" in text:
        found.update(quantity(match.group()) for match in _FRACTION.finditer(text))
    return found


def numbers_in_words(text: str) -> set[str]:
    """The numbers that stand in words: "half an hour", "two"."""
    return {_WORDS[match.lower()] for match in _WORD.findall(text)}


def agree(first: str, second: str) -> bool:
    """Equal numbers, but for sign, percent sign and rounding to the digits that the shorter one shows."""
    one, other = first.strip("-%"), second.strip("-%")
    if one == other:
        return True
    if first[:1].isalpha() or second[:1].isalpha():
        return False
    try:
        exact, shown = Fraction(one), Fraction(other)
    except (ValueError, ZeroDivisionError):
        return False
    if "%" in first + second and exact and shown / exact in (100, Fraction(1, 100)):
        return True
    digits = min(len(text.partition(".")[2]) if "/" not in text else 12 for text in (one, other))
    return (exact.denominator != 1 or shown.denominator != 1) and 2 * abs(exact - shown) * 10**digits <= 1


def _plain(number: str) -> str:
    if len(number) > MAX_NUMBER:
        return number[:MAX_NUMBER] + "…"
    whole, point, decimals = number.replace(",", "").partition(".")
    decimals = decimals.rstrip("0")
    return (whole.lstrip("0") or "0") + (point + decimals if decimals else "")


def _of_fraction(top: int, bottom: int) -> str:
    value = Fraction(top, bottom)
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return _plain(f"{float(value):.12f}") if rest == 1 and value >= 0 else str(value)
