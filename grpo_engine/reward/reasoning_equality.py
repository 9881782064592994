"""Whether two sides of an equation are equal: exactly, by rounding, by a percentage read either way, or by units."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Literal

from grpo_engine.reward import reasoning_values as values
from grpo_engine.reward.reasoning_nodes import Node, Side
from grpo_engine.reward.reasoning_units import convertible
from grpo_engine.reward.reasoning_values import NoValueError, Value, constant

Percent = Literal["share", "bare", "change"]
"""How % is read: 20% = 0.2; 20% = 20, as in 10/50*100 = 20%; 50 + 10% = 55."""
_PAIRS: tuple[tuple[Percent, Percent], ...] = (
    ("share", "share"), ("bare", "bare"), ("share", "bare"), ("bare", "share"), ("change", "share"),
)  # fmt: skip
_BINARY: dict[str, Callable[[Value, Value], Value]] = {
    "+": values.add, "-": lambda left, right: values.add(left, right, -1), "*": values.multiply, "/": values.divide,
    "^": values.power, "mod": values.modulo, "whole": values.whole, "binom": values.binomial,
}  # fmt: skip
_FLOAT_DIGITS = 10


def evaluate(node: Node, percent: Percent = "share", thirds: bool = False) -> Value:
    """The exact value. Raises NoValueError.

    thirds: 3.33, 0.67 and their like stand for the thirds that they round.
    """
    if node.kind == "number":
        return _third(node) if thirds else node.value
    if node.kind == "variable":
        return values.variable(node.name)
    if percent == "change" and node.kind in ("+", "-") and node.parts[1].kind == "percent":
        changed = values.add(Fraction(1), evaluate(node.parts[1]), 1 if node.kind == "+" else -1)
        return values.multiply(evaluate(node.parts[0], percent, thirds), changed)
    parts = [evaluate(part, percent, thirds) for part in node.parts]
    match node.kind:
        case "percent":
            return parts[0] if percent == "bare" else values.divide(parts[0], Fraction(100))
        case "negative":
            return values.multiply(Fraction(-1), parts[0])
        case "!":
            return values.factorial(parts[0])
        case "sqrt":
            return values.square_root(parts[0])
        case "gcd" | "lcm":
            whole = [number for part in parts if (number := constant(part)) and number.denominator == 1]
            if len(whole) != 2:
                raise NoValueError("it needs two whole numbers")
            return Fraction((math.gcd if node.kind == "gcd" else math.lcm)(*(int(number) for number in whole)))
    return _BINARY[node.kind](parts[0], parts[1])


def equal(left: Side, right: Side, about: bool) -> bool | None:
    """Whether the two sides are equal; None where that cannot be decided. about: the text says that it rounds."""
    percents = _PAIRS if left.node.contains("percent") or right.node.contains("percent") else _PAIRS[:1]
    plain: bool | None = None
    for modes in percents:
        try:
            same = _same(left, right, evaluate(left.node, modes[0]), evaluate(right.node, modes[1]), about)
        except NoValueError:
            same = None
        if same:
            return True
        plain = same if modes == _PAIRS[0] else plain
    if plain is None:
        return _irrational(left, right, about)
    return _by_thirds(left, right) or convertible_sides(left, right) or False


def convertible_sides(left: Side, right: Side) -> bool:
    """30 minutes * 2 = 1 hour."""
    first, second = constant(evaluate(left.node)), constant(evaluate(right.node))
    return bool(first and second and convertible(first / second, left.units, right.units))


def _same(left: Side, right: Side, first: Value, second: Value, about: bool) -> bool | None:
    one, other = constant(first), constant(second)
    if one is None or other is None:
        return _same_terms(left, first, second)
    if one == other:
        return True
    shown = right.node.literal or left.node.literal
    return shown is not None and rounds(one, other, shown.decimals, about)


def _same_terms(left: Side, first: Value, second: Value) -> bool | None:
    """Identities hold or stay undecided; 3x + 2x = 6x, a sum of one kind of term, is decided."""
    one, other = values.polynomial(first), values.polynomial(second)
    if one == other:
        return True
    summed = left.node.kind in ("+", "-") and len(one) == len(other) == 1 and one.keys() == other.keys()
    return False if summed else None


def rounds(exact: Fraction, shown: Fraction, decimals: int, about: bool) -> bool:
    """Whether one number is the other, rounded to `decimals` digits after the point.

    Two digits and more may also be cut off instead of rounded. Whole numbers must say that they are rounded; they may
    then be off by one unit of their last digit that is not 0, but at most by a tenth. Many digits are a computer's, who
    loses some.
    """
    distance = abs(exact - shown)
    if decimals >= _FLOAT_DIGITS:
        return bool(distance <= abs(exact) / 10**_FLOAT_DIGITS)
    if decimals >= 2 or (decimals == 1 and about):
        return distance < Fraction(1, 10**decimals)
    if decimals == 1:
        return distance <= Fraction(1, 20)
    if not about:
        return False
    unit = _last_unit(shown) if shown.denominator == 1 else _last_unit(exact)
    return distance <= unit and 10 * distance <= max(abs(exact), abs(shown), Fraction(10))


def _last_unit(number: Fraction) -> Fraction:
    digits = str(abs(int(number)))
    return Fraction(10 ** (len(digits) - len(digits.rstrip("0")))) if digits != "0" else Fraction(1)


def _third(node: Node) -> Fraction:
    nearest = Fraction(round(node.value * 3), 3)
    recurring = node.decimals >= 2 and nearest.denominator == 3
    return nearest if recurring and abs(nearest - node.value) < Fraction(1, 10**node.decimals) else node.value


def _by_thirds(left: Side, right: Side) -> bool:
    try:
        return evaluate(left.node, thirds=True) == evaluate(right.node, thirds=True)
    except NoValueError:
        return False


def _irrational(left: Side, right: Side, about: bool) -> bool | None:
    """Square roots and π against a decimal: right or undecided, within the digits that are shown."""
    shown = right.node.literal
    if shown is None or _has_other_variables(left.node):
        return None
    for pi in (math.pi, 3.14, 22 / 7):
        try:
            number = Fraction(_approximate(left.node, pi))
            target = constant(evaluate(right.node))
        except (NoValueError, ArithmeticError, ValueError):
            return None
        if target is not None and (shown.decimals or about) and rounds(number, target, shown.decimals, about):
            return True
    return None


def _has_other_variables(node: Node) -> bool:
    """Variables besides π."""
    if node.kind == "variable":
        return node.name != "π"
    return any(_has_other_variables(part) for part in node.parts)


def _approximate(node: Node, pi: float) -> float:
    """Raises NoValueError, ArithmeticError or ValueError."""
    if node.kind == "variable":
        return pi
    if node.kind == "sqrt":
        return math.sqrt(_approximate(node.parts[0], pi))
    if node.kind in ("+", "-", "*", "/", "negative") and node.parts:
        parts = [_approximate(part, pi) for part in node.parts]
        match node.kind:
            case "+":
                return parts[0] + parts[1]
            case "-":
                return parts[0] - parts[1]
            case "*":
                return parts[0] * parts[1]
            case "/":
                return parts[0] / parts[1]
        return -parts[0]
    if node.kind == "^" and not node.parts[1].contains("variable"):
        exponent = constant(evaluate(node.parts[1]))
        if exponent is not None and abs(exponent) <= 100:
            return math.pow(_approximate(node.parts[0], pi), float(exponent))
    number = constant(evaluate(node))
    if number is None:
        raise NoValueError("it has variables")
    return float(number)
