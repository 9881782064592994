"""Equations in one variable as polynomials, and whether going from one to the next keeps the solutions."""

from __future__ import annotations

from fractions import Fraction

from grpo_engine.reward.reasoning_values import Polynomial

Coefficients = list[Fraction]
"""Of x^0, x^1, …; the last is not 0."""


def single_variable(polynomial: Polynomial) -> tuple[str, Coefficients] | None:
    """The variable and coefficients; None when there is none or more than one."""
    names = {name for monomial in polynomial for name, _ in monomial}
    if len(names) != 1:
        return None
    degree = max(exponent for monomial in polynomial for _, exponent in monomial)
    coefficients = [Fraction(0)] * (degree + 1)
    for monomial, coefficient in polynomial.items():
        coefficients[monomial[0][1] if monomial else 0] = coefficient
    return names.pop(), coefficients


def keeps_solutions(first: Coefficients, second: Coefficients) -> bool:
    """Whether the roots of one are all roots of the other: equal equations, a root named, a factor added or divided
    away. Multiplicity does not matter."""
    one, other = squarefree(first), squarefree(second)
    return not remainder(one, other) or not remainder(other, one)


def root_of_line(coefficients: Coefficients) -> Fraction | None:
    """The solution of a x + b = 0; None for other degrees."""
    return -coefficients[0] / coefficients[1] if len(coefficients) == 2 else None


def squarefree(coefficients: Coefficients) -> Coefficients:
    """The polynomial with every root once: p / gcd(p, p')."""
    derivative = [power * value for power, value in enumerate(coefficients)][1:]
    common, rest = coefficients, derivative
    while rest:
        common, rest = rest, remainder(common, rest)
    return _quotient(coefficients, common)


def remainder(dividend: Coefficients, divisor: Coefficients) -> Coefficients:
    """Of polynomial division; [] for none. The divisor's last coefficient is not 0."""
    rest = list(dividend)
    while len(rest) >= len(divisor):
        factor, shift = rest[-1] / divisor[-1], len(rest) - len(divisor)
        rest = [
            value - factor * divisor[power - shift] if power >= shift else value for power, value in enumerate(rest)
        ][:-1]
        while rest and not rest[-1]:
            rest.pop()
    return rest


def _quotient(dividend: Coefficients, divisor: Coefficients) -> Coefficients:
    rest, quotient = list(dividend), [Fraction(0)] * (len(dividend) - len(divisor) + 1)
    for shift in reversed(range(len(quotient))):
        factor = rest[shift + len(divisor) - 1] / divisor[-1]
        quotient[shift] = factor
        for power, value in enumerate(divisor):
            rest[shift + power] -= factor * value
    return quotient
