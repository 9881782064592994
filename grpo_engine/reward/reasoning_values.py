"""Exact values of expressions: fractions, and polynomials over named variables. Bounded: nothing can grow huge."""

from __future__ import annotations

import math
from fractions import Fraction

Monomial = tuple[tuple[str, int], ...]
Polynomial = dict[Monomial, Fraction]
"""Monomial, such as (("x", 2),), to coefficient, never 0. The empty monomial is the constant; {} is 0."""
Value = Fraction | Polynomial

_MAX_BITS = 4096
_MAX_TERMS = 30
_MAX_DEGREE = 8
_MAX_FACTORIAL = 60


class NoValueError(Exception):
    """The expression has no exact value that these rules can find; its message says why."""


def constant(value: Value) -> Fraction | None:
    """The value as a number; None when it has variables."""
    if isinstance(value, Fraction):
        return value
    if not value:
        return Fraction(0)
    return value.get(()) if len(value) == 1 else None


def polynomial(value: Value) -> Polynomial:
    if isinstance(value, dict):
        return value
    return {(): value} if value else {}


def variable(name: str) -> Polynomial:
    return {((name, 1),): Fraction(1)}


def add(left: Value, right: Value, sign: int = 1) -> Value:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return bounded(left + sign * right)
    total = dict(polynomial(left))
    for monomial, coefficient in polynomial(right).items():
        summed = total.get(monomial, Fraction(0)) + sign * coefficient
        if summed:
            total[monomial] = bounded(summed)
        else:
            total.pop(monomial, None)
    return total


def multiply(left: Value, right: Value) -> Value:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return bounded(left * right)
    product: Polynomial = {}
    for monomial, coefficient in polynomial(left).items():
        for other, factor in polynomial(right).items():
            key = _joined(monomial, other)
            product[key] = product.get(key, Fraction(0)) + bounded(coefficient * factor)
        if len(product) > _MAX_TERMS:
            raise NoValueError("it has too many terms")
    return {monomial: bounded(coefficient) for monomial, coefficient in product.items() if coefficient}


def divide(left: Value, right: Value) -> Value:
    """Raises NoValueError for a divisor that is 0 or has variables."""
    divisor = constant(right)
    if divisor is None:
        raise NoValueError("it divides by a variable")
    if not divisor:
        raise NoValueError("it divides by 0")
    return multiply(left, 1 / divisor)


def power(base: Value, exponent: Value) -> Value:
    """Whole exponents, and the exact square root. Raises NoValueError for others and for huge results."""
    number = constant(exponent)
    if number is None:
        raise NoValueError("its exponent is a variable")
    if number == Fraction(1, 2):
        return square_root(base)
    if number.denominator != 1 or abs(number) > 1000:
        raise NoValueError("its exponent is no small whole number")
    times = int(number)
    value = constant(base)
    if value is not None:
        if not value and times < 0:
            raise NoValueError("it divides by 0")
        if abs(times) * max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
            raise NoValueError("it is too large")
        return value**times
    if not 0 <= times <= _MAX_DEGREE:
        raise NoValueError("its exponent is out of range")
    result: Value = Fraction(1)
    for _ in range(times):
        result = multiply(result, base)
    return result


def square_root(value: Value) -> Fraction:
    number = constant(value)
    if number is None or number < 0:
        raise NoValueError("its root is not known")
    top, bottom = math.isqrt(number.numerator), math.isqrt(number.denominator)
    if top * top != number.numerator or bottom * bottom != number.denominator:
        raise NoValueError("its root is not rational")
    return Fraction(top, bottom)


def factorial(value: Value) -> Fraction:
    return Fraction(math.factorial(_count(value)))


def binomial(top: Value, bottom: Value) -> Fraction:
    return Fraction(math.comb(_count(top), _count(bottom)))


def modulo(left: Value, right: Value) -> Fraction:
    dividend, divisor = constant(left), constant(right)
    if dividend is None or not divisor:
        raise NoValueError("its remainder is not known")
    return dividend % divisor


def whole(left: Value, right: Value) -> Fraction:
    """Floor division."""
    quotient = constant(divide(left, right))
    if quotient is None:
        raise NoValueError("its quotient is not known")
    return Fraction(math.floor(quotient))


def bounded(value: Fraction) -> Fraction:
    if value.numerator.bit_length() > _MAX_BITS or value.denominator.bit_length() > _MAX_BITS:
        raise NoValueError("it is too large")
    return value


def _count(value: Value) -> int:
    number = constant(value)
    if number is None or number.denominator != 1 or not 0 <= number <= _MAX_FACTORIAL:
        raise NoValueError("it needs a small whole number")
    return int(number)


def _joined(left: Monomial, right: Monomial) -> Monomial:
    exponents = dict(left)
    for name, exponent in right:
        exponents[name] = exponents.get(name, 0) + exponent
    if sum(exponents.values()) > _MAX_DEGREE:
        raise NoValueError("its degree is too high")
    return tuple(sorted(exponents.items()))
