"""Equations transformed line to line: going from one to the next must keep the solutions.

Only equations in one and the same variable are compared, and only where nothing between them begins anew.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from grpo_engine.reward import reasoning_values as values
from grpo_engine.reward.reasoning_equality import evaluate, rounds
from grpo_engine.reward.reasoning_equations import Equation
from grpo_engine.reward.reasoning_nodes import canonical
from grpo_engine.reward.reasoning_roots import Coefficients, keeps_solutions, root_of_line, single_variable
from grpo_engine.reward.reasoning_values import NoValueError

_MAX_DISTANCE = 400
# After these a variable may stand for something else, or an equation need not follow from the one before.
_ANEW = re.compile(
    r"\b(?:let|lets|suppose|assume|if|case|when|where|now|new|next|another|other|second|also|instead|similarly|"
    r"check|checking|verify|test|testing|try|trying|wait|actually|alternatively|define|denote|problem|question|"
    r"example|part|for|either|consider|recall|given|plug|plugging|substitute|substituting|set|setting|"
    r"mistake|error|wrong|incorrect|not|no|or|discriminant|vertex|minimum|maximum|derivative|mod|modulo)\b|[<>≤≥≠?]"
    r"|\\(?:le|ge|neq?|leq|geq)\b",
    re.IGNORECASE,
)
# A root among others, a question, or a case: "x = 2 or x = 3", "x = 2?", "x = 2: …".
_ONE_OF_SEVERAL = re.compile(r"[ \t$)]{0,4}(?:,? (?:or|and)\b|\?|:)")


@dataclass(frozen=True, slots=True)
class Line:
    """An equation in one variable, as a polynomial that is 0."""

    start: int
    end: int
    name: str
    coefficients: Coefficients
    about: bool
    decimals: int
    """Digits that its number shows, for rounding; -1 where it is not "variable = number"."""
    key: str
    assigns: bool
    """It is variable = something without variables."""


@dataclass(frozen=True, slots=True)
class Transformed:
    """An equation that should follow from the one before it."""

    span: tuple[int, int]
    said: tuple[int, int]
    """Place of the equation before."""
    right: bool
    key: str
    """Equal where the same equation was made into the same."""


def transformed(text: str, equations: Sequence[Equation]) -> list[Transformed]:
    """Every pair of neighbouring equations in one variable of which the second should follow from the first."""
    lines = [line for equation in _unchained(equations) if (line := _line(equation)) is not None]
    tried = _tried(lines)
    return [
        _step(first, second)
        for first, second in pairwise(lines)
        if first.name not in tried and _follows(text, first, second)
    ]


def _unchained(equations: Sequence[Equation]) -> Iterator[Equation]:
    """Without what goes on in a chain: y = 2x + 3 = 2(4) + 3 puts 4 for x, and says nothing about other values of x."""
    end = -1
    for equation in equations:
        if equation.left.start != end:
            yield equation
        end = equation.right.start


def _tried(lines: Sequence[Line]) -> set[str]:
    """Variables that get many values: they count or are tried out, so that nothing follows from their equations."""
    given: dict[str, set[Fraction | None]] = {}
    for line in lines:
        if line.assigns:
            given.setdefault(line.name, set()).add(root_of_line(line.coefficients))
    return {name for name, roots in given.items() if len(roots) > 2}


def _line(equation: Equation) -> Line | None:
    try:
        difference = values.add(evaluate(equation.left.node), evaluate(equation.right.node), -1)
    except NoValueError:
        return None
    found = single_variable(values.polynomial(difference))
    if found is None or found[0] == "π" or len(found[1]) > 5:
        return None
    literal = equation.right.node.literal if equation.left.node.kind == "variable" else None
    decimals = literal.decimals if literal else -1
    key = f"{canonical(equation.left.node)} = {canonical(equation.right.node)}"
    assigns = equation.left.node.kind == "variable" and not equation.right.node.contains("variable")
    return Line(equation.left.start, equation.right.end, *found, equation.about, decimals, key, assigns)


def _follows(text: str, first: Line, second: Line) -> bool:
    """Whether the second should follow from the first: near it, with nothing between that begins anew."""
    if first.name != second.name or not first.end <= second.start <= first.end + _MAX_DISTANCE:
        return False
    if first.assigns and second.assigns:
        return False  # two values of a variable are a question of consistency
    return not _ANEW.search(text, first.end, second.start) and not _ONE_OF_SEVERAL.match(text, second.end)


def _step(first: Line, second: Line) -> Transformed:
    right = keeps_solutions(first.coefficients, second.coefficients) or _rounded(first, second)
    return Transformed((second.start, second.end), (first.start, first.end), right, f"{first.key} => {second.key}")


def _rounded(first: Line, second: Line) -> bool:
    """x = 3.33 or x ≈ 3.3 after 3x = 10; x ≈ 1.41 after x^2 = 2."""
    shown = root_of_line(second.coefficients)
    if shown is None or second.decimals < 0:
        return False
    return any(rounds(root, shown, second.decimals, second.about) for root in _roots(first.coefficients))


def _roots(coefficients: Coefficients) -> list[Fraction]:
    """Real roots of degree 1 exactly, of degree 2 nearly; of higher degrees none."""
    line = root_of_line(coefficients)
    if line is not None:
        return [line]
    if len(coefficients) != 3:
        return []
    c, b, a = coefficients
    under = b * b - 4 * a * c
    if under < 0:
        return []
    try:
        root = Fraction(math.sqrt(under))
    except OverflowError:
        return []
    return [(-b + root) / (2 * a), (-b - root) / (2 * a)]
