"""Units that a step may convert without saying so: "30 minutes * 2 = 1 hour" is right."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import product

_TABLES: tuple[dict[str, Fraction | int], ...] = (
    {"second": 1, "sec": 1, "minute": 60, "min": 60, "hour": 3600, "hr": 3600, "day": 86400, "week": 604800},
    {"week": 7, "day": 1, "year": 365},
    {"week": 1, "month": 4, "year": 52},
    {"day": 1, "month": 30},
    {"month": 1, "year": 12, "decade": 120},
    {"inch": 1, "inches": 1, "foot": 12, "feet": 12, "ft": 12, "yard": 36, "mile": 63360},
    {"mm": 1, "cm": 10, "centimeter": 10, "meter": 1000, "km": 1000000, "kilometer": 1000000},
    {"mg": 1, "gram": 1000, "kg": 1000000, "kilogram": 1000000, "tonne": 1000000000},
    {"ounce": 1, "oz": 1, "pound": 16, "lb": 16, "ton": 32000},
    {"teaspoon": 1, "tablespoon": 3, "ounce": 6, "cup": 48, "pint": 96, "quart": 192, "gallon": 768},
    {"ml": 1, "milliliter": 1, "liter": 1000, "litre": 1000},
    {"cent": 1, "penny": 1, "pennies": 1, "nickel": 5, "dime": 10, "quarter": 25, "dollar": 100, "": 100},
    {"pair": 2, "dozen": 12, "score": 20, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "": 1},
)
"""Units of one kind and their sizes; "" stands for a number without a unit that the table knows."""


def convertible(ratio: Fraction, left: Sequence[str], right: Sequence[str]) -> bool:
    """Whether units explain that the left number is `ratio` times the right one."""
    for table in _TABLES:
        first, second = _sizes(table, left), _sizes(table, right)
        if (first or second) and any(
            one != other and ratio == Fraction(other) / Fraction(one)
            for one, other in product(first | _bare(table), second | _bare(table))
        ):
            return True
    return False


def known(word: str) -> bool:
    """Whether a word is a unit of some table."""
    return any(word in table or word.removesuffix("s") in table for table in _TABLES if word)


def _sizes(table: dict[str, Fraction | int], words: Sequence[str]) -> set[Fraction | int]:
    names = {name for word in words for name in (word, word.removesuffix("s")) if name}
    return {table[name] for name in names if name in table}


def _bare(table: dict[str, Fraction | int]) -> set[Fraction | int]:
    return {table[""]} if "" in table else set()
