"""Expressions as trees."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


class ParseError(Exception):
    """The tokens do not begin with an expression."""


@dataclass(frozen=True, slots=True)
class Node:
    """kind: number, variable, percent, negative, +, -, *, /, ^, mod, whole, !, sqrt, binom, gcd, lcm."""

    kind: str
    parts: tuple[Node, ...] = ()
    value: Fraction = Fraction(0)
    name: str = ""
    decimals: int = 0
    """Digits after the point of a number."""

    @property
    def literal(self) -> Node | None:
        """The node of a bare number, its sign and percent sign taken off; None for anything calculated."""
        if self.kind == "number":
            return self
        return self.parts[0].literal if self.kind in ("negative", "percent") else None

    def contains(self, kind: str) -> bool:
        return self.kind == kind or any(part.contains(kind) for part in self.parts)


@dataclass(frozen=True, slots=True)
class Side:
    """One side of an equation; [start, end) is its place in the text."""

    node: Node
    units: tuple[str, ...]
    start: int
    end: int
    ambiguous: bool = False
    """People read it in two ways, so that a difference proves nothing."""


def calculates(node: Node) -> bool:
    """Whether it is more than a number or a variable."""
    return node.literal is None and node.kind != "variable"


def canonical(node: Node) -> str:
    """The expression in one spelling: 3 × 4 and 4*3 are the same."""
    if node.kind == "number":
        return str(node.value)
    if node.kind == "variable":
        return node.name
    parts = [canonical(part) for part in node.parts]
    if node.kind in ("+", "*"):
        parts.sort()
    return f"({node.kind} {' '.join(parts)})"
