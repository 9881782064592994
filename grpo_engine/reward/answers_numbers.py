r"""Plain numbers, exactly: integers, decimals, fractions, mixed numbers, scientific notation, with sign and unit.

Everything else (sums, powers, roots, factorials) is no plain number, even where it has a value: an answer that is still
to be worked out is not an answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from grpo_engine.reward.answers_units import PERCENT, Unit, read_unit

MAX_DIGITS = 4000
"""More digits than this are compared as text."""
MAX_EXPONENT = 400

_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,3}(?: [0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.[0-9]*)?|\.[0-9]+)"
_SIGN = r"(?P<sign>[-+]?)\s*"
_MONEY = r"(?P<money>(?:US)?\$|[€£¥₹])?\s*"
_FRACTION = re.compile(
    rf"(?P<whole>[0-9]+)?\s*\\frac\s*(?:\{{\s*(?P<top>-?{_DECIMAL})\s*\}}|(?P<top1>[0-9]))\s*"
    rf"(?:\{{\s*(?P<bottom>-?{_DECIMAL})\s*\}}|(?P<bottom1>[0-9]))"
)
_SLASH = re.compile(rf"(?:(?P<whole>[0-9]+)\s+)?(?P<top>{_DECIMAL})\s*/\s*(?P<bottom>{_DECIMAL})(?!\s*/)")
_REPEATING = re.compile(r"(?P<start>[0-9]*\.[0-9]*)\\overline\s*\{(?P<period>[0-9]+)\}")
_PLAIN = re.compile(
    rf"(?P<digits>{_DECIMAL})"
    r"(?:[eE](?P<e>[-+]?[0-9]{1,3})(?![0-9])|\s*(?:\\times|\\cdot|\*|x(?= ?10\^))\s*10\^\{?(?P<ten>-?[0-9]{1,3})\}?)?"
)
_HEAD = re.compile(_SIGN + _MONEY + r"(?P<sign2>-?)")


@dataclass(frozen=True, slots=True)
class Number:
    """A quantity: `value` of `unit`."""

    value: Fraction
    unit: Unit | None = None


def read_number(text: str) -> Number | None:
    """The number that `text` (normalised) consists of, with its unit; None when it is not exactly that."""
    if len(text) > 2 * MAX_DIGITS or not text:
        return None
    head = _HEAD.match(text)
    assert head is not None, "every part of it may be empty"
    if head["sign"] and head["sign2"]:
        return None
    found = _magnitude(text, head.end())
    if found is None:
        return None
    value, end = found
    if "-" in (head["sign"], head["sign2"]):
        value = -value
    return _with_unit(value, head["money"], text[end:].strip())


def _with_unit(value: Fraction, money: str | None, rest: str) -> Number | None:
    """ "$5 million", "$5 per day", "$5 dollars"."""
    if not rest:
        return Number(value, read_unit(money) if money else None)
    unit = read_unit(rest)
    currency = read_unit(money) if money else None
    if currency and (unit is None or unit.dimension != currency.dimension):
        unit = read_unit(f"{money} {rest}")
    if unit is None:
        return None
    return Number(value * unit.count, unit if unit.dimension else None)


def _magnitude(text: str, start: int) -> tuple[Fraction, int] | None:
    """The unsigned number at `start` and where it ends."""
    for pattern, make in ((_FRACTION, _fraction), (_SLASH, _fraction), (_REPEATING, _repeating), (_PLAIN, _plain)):
        match = pattern.match(text, start)
        if match and match.end() - start <= MAX_DIGITS:
            value = make(match)
            return None if value is None else (value, match.end())
    return None


def _fraction(match: re.Match[str]) -> Fraction | None:
    groups = match.groupdict()
    top = _digits(groups.get("top1") or groups["top"])
    bottom = _digits(groups.get("bottom1") or groups["bottom"])
    if not bottom:
        return None
    return (_digits(groups["whole"]) if groups["whole"] else 0) + top / bottom


def _repeating(match: re.Match[str]) -> Fraction:
    r"""0.1\overline{6} = 1/6."""
    whole, decimals = match["start"].split(".")
    period = match["period"]
    head = Fraction(int(whole + decimals or "0"), 10 ** len(decimals))
    return head + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(decimals))


def _plain(match: re.Match[str]) -> Fraction | None:
    exponent = int(match["e"] or match["ten"] or 0)
    if abs(exponent) > MAX_EXPONENT:
        return None
    return _digits(match["digits"]) * Fraction(10) ** exponent


def _digits(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace(" ", "").rstrip(".") or "0")


def equal_quantities(answer: Number, gold: Number, tolerance: float = 0.0) -> bool:
    """Equal values, after converting units of one dimension, within the relative difference `tolerance` of the gold.

    A unit that only one side names is taken as understood. Percent: where the gold says percent, 50%, 50 and 0.5 are
    all 50%; where it does not, 50% is 50, never 0.5."""
    if answer.unit is None or gold.unit is None:
        in_percent = gold.unit is not None and gold.unit.dimension == PERCENT
        if in_percent and close(answer.value * 100, gold.value, tolerance):
            return True
        return close(answer.value, gold.value, tolerance)
    if answer.unit.dimension != gold.unit.dimension:
        return False
    return close(answer.value * answer.unit.factor, gold.value * gold.unit.factor, tolerance)


def close(answer: Fraction, gold: Fraction, tolerance: float) -> bool:
    """|answer - gold| <= tolerance x |gold|."""
    return answer == gold or (tolerance > 0 and abs(answer - gold) <= Fraction(str(tolerance)) * abs(gold))
