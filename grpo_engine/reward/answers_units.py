"""Units of an answer: "cm", "square metres", "km/h", "dollars", "%", "apples"."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

PERCENT = "percent"

# dimension: factor to its first unit = names
_TABLE = {
    "length": {
        "1": "m meter meters metre metres", "1/100": "cm centimeter centimeters centimetre centimetres",
        "1/1000": "mm millimeter millimeters millimetre millimetres",
        "1000": "km kilometer kilometers kilometre kilometres", "127/5000": "in inch inches",
        "381/1250": "ft foot feet", "1143/1250": "yd yard yards", "201168/125": "mi mile miles",
    },
    "mass": {
        "1": "kg kilogram kilograms kilo kilos", "1/1000": "g gram grams", "1/1000000": "mg milligram milligrams",
        "45359237/100000000": "lb lbs pound pounds", "45359237/1600000000": "oz ounce ounces",
        "1000": "t ton tons tonne tonnes",
    },
    "time": {
        "1": "s sec secs second seconds", "1/1000": "ms millisecond milliseconds", "60": "min mins minute minutes",
        "3600": "h hr hrs hour hours", "86400": "day days", "604800": "week weeks",
    },
    "months": {"1": "month months", "12": "year years yr yrs"},
    "volume": {
        "1": "L l liter liters litre litres", "1/1000": "mL ml milliliter milliliters millilitre millilitres",
        "473176473/125000000": "gal gallon gallons",
    },
    "dollar": {"1": "$ dollar dollars usd USD US$ bucks", "1/100": "cent cents ¢"},
    "euro": {"1": "€ euro euros EUR"},
    "sterling": {"1": "£ GBP", "1/100": "pence"},
    "yen": {"1": "¥ yen JPY"},
    "rupee": {"1": "₹ rupee rupees"},
    "degree": {"1": "° degree degrees deg"},
    "radian": {"1": "rad radian radians"},
    "celsius": {"1": "°C celsius"},
    "fahrenheit": {"1": "°F fahrenheit"},
    PERCENT: {"1": "% percent percentage pct"},
}  # fmt: skip
_KNOWN = {
    name: (dimension, Fraction(factor))
    for dimension, names_by_factor in _TABLE.items()
    for factor, names in names_by_factor.items()
    for name in names.split()
}
_COUNTS = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_EXPONENTS = frozenset("23456789")
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_WORDS_OF_TABLE = frozenset([*_COUNTS, *_POWERS])
_SHORT_WORDS = frozenset(["of", "a", "an", "in", "by"])
# A number with one of these behind it says something else than a quantity.
_NO_UNITS = frozenset([
    "or", "and", "not", "no", "is", "are", "isn", "aren", "was", "to", "than", "over", "under", "above", "below",
    "more", "less", "plus", "minus", "divided", "squared", "cubed", "between", "wrong", "incorrect", "false", "but",
    "pi", "inf", "infinity", "sin", "cos", "tan", "log", "ln", "sqrt", "mod", "pm", "choose", "almost", "exactly",
])  # fmt: skip
_TOKEN = re.compile(r"\s*(?:(\^?-?[0-9]+)|(/|per(?![a-zA-Z]))|([*·]|\\cdot)|([a-zA-Z]+\$?|°[CF]?|[$€£¥₹¢%]))")
_TIDY = (
    ("^\\circ C", "°C"), ("^\\circ F", "°F"), ("^\\circ", "°"), ("{", ""), ("}", ""), ("per cent", "percent"),
    ("mph", "mi/h"), ("degrees Celsius", "celsius"), ("degrees Fahrenheit", "fahrenheit"),
)  # fmt: skip
MAX_WORDS = 4


@dataclass(frozen=True, slots=True)
class Unit:
    """Quantities of one dimension compare after multiplying with their factors."""

    dimension: str
    """Such as "length^2" or "length/time"; for words that the table lacks "word:apples"."""
    factor: Fraction = Fraction(1)
    count: int = 1
    """What counting words make of the number before it: 10^6 for "million dollars"."""


def read_unit(text: str) -> Unit | None:
    """What stands behind a number; None when that is no unit. `text`: normalised, not empty. A counting word alone has
    the dimension ""."""
    for old, new in _TIDY:
        text = text.replace(old, new)
    if len(text) > 60:
        return None
    tokens: list[tuple[str, ...]] = []
    end = 0
    while token := _TOKEN.match(text, end):
        tokens.append(token.groups())
        end = token.end()
    if not tokens or text[end:].strip():
        return None
    return _combine(tokens)


def _combine(tokens: list[tuple[str, ...]]) -> Unit | None:
    """Tokens to powers of dimensions; an unknown word makes the whole a word unit."""
    words = [word for *_, word in tokens if word]
    count = math.prod(_COUNTS.get(word.lower(), 1) for word in words)
    if any(word.lower() not in _WORDS_OF_TABLE and _known(word) is None for word in words):
        return _of_words([word.lower() for word in words], tokens, count)
    powers: dict[str, int] = {}
    factor, sign, next_power = Fraction(1), 1, 1
    last: tuple[str, Fraction] | None = None
    for digits, slash, times, word in tokens:
        if digits:
            if last is None or digits.lstrip("^") not in _EXPONENTS:
                return None
            more = sign * (int(digits.lstrip("^")) - 1)
            powers[last[0]], factor, last = powers[last[0]] + more, factor * last[1] ** more, None
        elif slash or times:
            sign, last = -1 if slash else sign, None
        elif word.lower() in _POWERS:
            next_power = _POWERS[word.lower()]
        elif word and (last := _known(word)):
            powers[last[0]] = powers.get(last[0], 0) + sign * next_power
            factor, next_power = factor * last[1] ** (sign * next_power), 1
    named = sorted((name, power) for name, power in powers.items() if power)
    return Unit(" ".join(f"{name}^{power}" if power != 1 else name for name, power in named), factor, count)


def _known(word: str) -> tuple[str, Fraction] | None:
    """Dimension and factor; capitals matter only in names of one letter."""
    return _KNOWN.get(word) or (_KNOWN.get(word.lower()) if len(word) > 1 else None)


def _of_words(words: list[str], tokens: list[tuple[str, ...]], count: int) -> Unit | None:
    """ "red apples", "pages per day": the last word is the unit."""
    if len(words) > MAX_WORDS or _NO_UNITS.intersection(words) or any(digits for digits, *_ in tokens):
        return None
    short = [word for word in words if len(word) < 3 and word not in _SHORT_WORDS and _known(word) is None]
    if short or len(words[-1]) < 3:
        return None
    return Unit("word:" + _singular(words[-1]), Fraction(1), count)


def _singular(word: str) -> str:
    return word[:-1] if word.endswith("s") and len(word) > 3 else word
