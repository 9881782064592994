"""The checkable steps of a text, each found right or wrong: arithmetic, and equations transformed line to line.

A chain a = b = c is two steps. A step that is said again, in whatever spelling, counts once. What cannot be decided for
sure is no step: precision goes before recall.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from grpo_engine.reward.reasoning_equality import equal, evaluate
from grpo_engine.reward.reasoning_equations import Equation, read_equations
from grpo_engine.reward.reasoning_nodes import Node, Side, calculates, canonical
from grpo_engine.reward.reasoning_transforms import Transformed, transformed
from grpo_engine.reward.reasoning_values import NoValueError, constant
from grpo_engine.reward.reasoning_words import COMPARING, OTHER_ARITHMETIC

# A solution that takes a wrong step back, asks whether it holds or only supposes it has not made it.
_TAKEN_BACK = re.compile(
    r"[\s)\]}$.,;:—–-]{0,6}(?:no\b(?! \w+ (?:left|remain))|wait|oops|hmm|wrong|incorrect|false|"
    r"not (?:right|correct|true|equal|what)|"
    r"but (?:that|this)|(?:that|this|which)(?:'s| is| was)? (?:not|wrong|incorrect|false|impossible|a mistake)|"
    r"is (?:not|wrong|incorrect|false)|(?:does not|doesn't|cannot|can't) |a contradiction|i made|mistake|\?|✗|❌)",
    re.IGNORECASE,
)
_SUPPOSED = re.compile(
    r"(?:n['’]t|\b(?:not|if|whether|suppose|supposing|assume|assuming|guess|instead of|incorrectly|wrongly|mistakenly|"
    r"would be wrong|thought|claims?|claimed|says?|check(?:ing)? (?:that|if)))\b[^.,;:\n]{0,40}$",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Step:
    """One equation and its verdict; [start, end) is its place in the text."""

    start: int
    end: int
    right: bool
    key: str
    """Equal for steps that say the same in other spellings."""
    why: str = ""
    """What is wrong, as a clause."""


def find_steps(text: str) -> list[Step]:
    """Every checkable step of the text once, in order."""
    equations = read_equations(text)
    steps = [step for index in range(len(equations)) if (step := _arithmetic(equations, index)) is not None]
    steps += [_of_transformed(text, pair) for pair in transformed(text, equations)]
    once: dict[str, Step] = {}
    for step in sorted(steps, key=lambda step: (step.start, step.end)):
        if step.right or not _disowned(text, step):
            once.setdefault(step.key, step)
    return list(once.values())


def _disowned(text: str, step: Step) -> bool:
    line = text.rfind("\n", 0, step.start) + 1
    return bool(_TAKEN_BACK.match(text, step.end) or _SUPPOSED.search(text, max(line, step.start - 60), step.start))


# ---------------------------------------------------------------- arithmetic
def _arithmetic(equations: Sequence[Equation], index: int) -> Step | None:
    """The verdict on an equation between numbers; None where it cannot be decided."""
    equation = equations[index]
    left, right = equation.left, equation.right
    if not _is_step(equations, index):
        return None
    divided = _with_remainder(equation)
    verdict = equal(left, right, equation.about) if divided is None else divided
    if verdict is False and index + 1 < len(equations) and _running_total(equation, equations[index + 1]):
        verdict = True
    if verdict is None or (not verdict and divided is None and _excused(equation)):
        return None
    if verdict and not calculates(left.node) and not calculates(right.node):
        return None
    key = f"{canonical(left.node)} = {canonical(right.node)}"
    return Step(left.start, right.end, verdict, key, "" if verdict else _should_be(left, right))


def _is_step(equations: Sequence[Equation], index: int) -> bool:
    """Whether it calculates something, or ends a chain with another number than the one before: 3 + 4 = 7 = 8."""
    equation = equations[index]
    left, right = equation.left, equation.right
    if equation.relation.kind == "verb":
        return calculates(left.node) and _plain_result(equation)
    if calculates(left.node) or (calculates(right.node) and equation.opened):
        return True
    before = equations[index - 1] if index else None
    chained = before is not None and before.right.start == left.start and calculates(before.left.node)
    return chained and bool(left.node.literal and right.node.literal) and left.units == right.units


def _plain_result(equation: Equation) -> bool:
    """ "12 times 7 is 84", but not "84 more than" and not "half of what"."""
    if equation.after and equation.after[0].text in COMPARING:
        return False
    return equation.right.node.literal is not None or equation.relation.text.startswith("equal")


def _running_total(equation: Equation, following: Equation) -> bool:
    """20 - 5 = 15 - 3 = 12 goes on calculating with the result: each part is right, though the chain is not."""
    first = equation.right.node
    while first.parts and first.kind in ("+", "-", "*", "/"):
        first = first.parts[0]
    try:
        goes_on = first is not equation.right.node and first.value == evaluate(equation.left.node)
    except NoValueError:
        return False
    return goes_on and following.left.start == equation.right.start


def _with_remainder(equation: Equation) -> bool | None:
    """17 / 5 = 3 remainder 2; None where no remainder is named."""
    left, right = equation.left.node, equation.right.node
    named = [token for token in equation.after[:3] if token.text != "and"]
    if left.kind != "/" or len(named) < 2 or named[0].text not in ("remainder", "rem") or named[1].value is None:
        return None
    try:
        dividend, divisor, quotient = (constant(evaluate(node)) for node in (*left.parts, right))
    except NoValueError:
        return None
    if dividend is None or divisor is None or quotient is None:
        return None
    return dividend == quotient * divisor + named[1].value and named[1].value < abs(divisor)


def _excused(equation: Equation) -> bool:
    """Unequal, but perhaps right in a way that is not read: ranges, bullets, division in two ways, other arithmetic."""
    words = {token.text for token in equation.after if token.kind == "word"}
    words.update(equation.left.units, equation.right.units)
    return (
        bool(words & OTHER_ARITHMETIC)
        or equation.bullet
        or equation.left.ambiguous
        or equation.right.ambiguous
        or _range(equation.right.node)
        or (equation.relation.kind == "verb" and _range(equation.left.node))
    )


def _range(node: Node) -> bool:
    """5-10 may be from five to ten."""
    if node.kind != "-" or any(part.kind != "number" for part in node.parts):
        return False
    return node.parts[0].value < node.parts[1].value


def _should_be(left: Side, right: Side) -> str:
    """What the calculated side is."""
    side = left if calculates(left.node) or not calculates(right.node) else right
    try:
        value = None if side.node.contains("variable") else constant(evaluate(side.node))
    except NoValueError:
        value = None
    return "the sides differ" if value is None else f"the {'left' if side is left else 'right'} side is {shown(value)}"


def shown(value: Fraction) -> str:
    """A number as people write it: 5, 2.5 or 10/3."""
    denominator = value.denominator
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
    exact = str(value) if value.denominator == 1 or denominator != 1 else f"{float(value):.10g}"
    return exact if len(exact) <= 40 else "a number of many digits"


# ---------------------------------------------------------------- equations in a variable
def _of_transformed(text: str, pair: Transformed) -> Step:
    said = " ".join(text[pair.said[0] : pair.said[1]].split())
    why = "" if pair.right else f"it does not follow from {said[:60]}"
    return Step(*pair.span, pair.right, pair.key, why)
