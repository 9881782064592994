"""The equations of a text that can be read: two sides, each an expression, around a relation.

A side is read only where nothing beside it could change its meaning: precision goes before recall.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from grpo_engine.reward.reasoning_nodes import ParseError, Side
from grpo_engine.reward.reasoning_parser import Parser
from grpo_engine.reward.reasoning_tokens import Token, tokenize
from grpo_engine.reward.reasoning_units import known
from grpo_engine.reward.reasoning_words import ABOUT, LEADING, OPENERS, PARTIAL, SHARES

_MAX_SIDE_TOKENS = 80
_NEAR = 40
_MAX_EQUATIONS = 2000
_MAX_SYMBOLIC = 200
_HINT = re.compile(r"[=≈≃≅]|\\approx|\\simeq|\b(?:is|are|was|equals?|makes|gives)\b")
_FENCE = re.compile(r"^[ \t]*(?:```|~~~)[^\n]*$", re.MULTILINE)
_MARK = re.compile(r"<<([^<>\n]{1,200})>>")


@dataclass(frozen=True, slots=True)
class Equation:
    """Two sides that were read, with what stands around them."""

    left: Side
    right: Side
    relation: Token
    after: Sequence[Token]
    """Tokens behind the right side, up to the break."""
    about: bool
    continues: bool
    """The relation begins a line: the right side simplifies the left one."""
    opened: bool
    """Nothing that could change the meaning stands before the left side."""
    bullet: bool
    """The left side follows a dash that may be a list's or a minus."""


def read_equations(text: str) -> list[Equation]:
    """Every equation whose two sides can be read, in order, calculator marks (<<48/2=24>>) included.

    At most the first 2,000, and the first 200 with variables, so that a hostile text stays cheap.
    """
    found: list[Equation] = []
    num_symbolic = 0
    for start, end in _stretches(text):
        tokens = tokenize(text, start, end)
        for index in (index for index, token in enumerate(tokens) if token.kind in ("relation", "verb")):
            equation = _equation(tokens, index)
            if equation is None:
                continue
            symbolic = equation.left.node.contains("variable") or equation.right.node.contains("variable")
            num_symbolic += symbolic
            if not symbolic or num_symbolic <= _MAX_SYMBOLIC:
                found.append(equation)
            if len(found) >= _MAX_EQUATIONS:
                return found
    return found


def _stretches(text: str) -> Iterator[tuple[int, int]]:
    """The parts of the text that are read by themselves: runs of lines, and the insides of calculator marks."""
    for start, end in _regions(text):
        yield start, end
        for mark in _MARK.finditer(text, start, end):
            yield mark.span(1)


def _regions(text: str) -> list[tuple[int, int]]:
    """Runs of lines that may hold equations, fenced code left out."""
    regions: list[tuple[int, int]] = []
    fenced, position = False, 0
    while position < len(text):
        end = text.find("\n", position)
        end = len(text) if end < 0 else end
        if _FENCE.match(text, position, end):
            fenced = not fenced
        elif not fenced and (_HINT.search(text, position, end) or not text[position:end].strip()):
            if regions and regions[-1][1] + 1 == position:
                regions[-1] = (regions[-1][0], end)
            else:
                regions.append((_line_before(text, position), end))
        position = end + 1
    return regions


def _line_before(text: str, position: int) -> int:
    """A line that begins with a relation needs the line before it."""
    if not text[position : position + 40].lstrip(" \t&$").startswith(("=", "≈", "\\approx")):
        return position
    return text.rfind("\n", 0, max(0, position - 1)) + 1


# ---------------------------------------------------------------- reading the two sides
def _equation(tokens: Sequence[Token], index: int) -> Equation | None:
    before, begins = _left_piece(tokens, index)
    after = _right_piece(tokens, index)
    found = _left_side(before)
    right = _right_side(after)
    if found is None or right is None:
        return None
    left, at = found
    side, used = right
    relation = tokens[index]
    about = relation.text.startswith("≈") or _says_about(tokens, index)
    opened = at == 0 or before[at - 1].text in OPENERS or before[at - 1].kind == "comma"
    bullet = at == 0 and begins is not None and begins.text == "-" and begins.kind == "break"
    return Equation(left, side, relation, after[used:], about, relation.text.endswith("\n"), opened, bullet)


def _says_about(tokens: Sequence[Token], index: int) -> bool:
    """Whether the sentence around the relation says that it rounds."""
    for steps in (range(index, max(-1, index - _NEAR), -1), range(index, min(len(tokens), index + _NEAR))):
        for place in steps:
            if tokens[place].text in ABOUT:
                return True
            if tokens[place].kind == "newline" or (tokens[place].kind == "break" and tokens[place].text in ".;"):
                break
    return False


def _left_piece(tokens: Sequence[Token], index: int) -> tuple[list[Token], Token | None]:
    """Tokens between the relation and the break, relation or open bracket before it; and that token."""
    depth, first = 0, index
    while first > 0 and index - first < _MAX_SIDE_TOKENS:
        token = tokens[first - 1]
        if token.text == ")" and token.kind == "operator":
            depth += 1
        elif token.text == "(" and token.kind == "operator":
            if not depth:
                break
            depth -= 1
        elif token.kind in ("break", "newline", "relation", "verb") or (token.kind == "comma" and not depth):
            break
        first -= 1
    return list(tokens[first:index]), tokens[first - 1] if first else None


def _right_piece(tokens: Sequence[Token], index: int) -> list[Token]:
    depth, last = 0, index + 1
    while last < len(tokens) and last - index <= _MAX_SIDE_TOKENS:
        token = tokens[last]
        if token.text == "(" and token.kind == "operator":
            depth += 1
        elif token.text == ")" and token.kind == "operator":
            if not depth:
                break
            depth -= 1
        elif token.kind in ("break", "newline", "relation", "verb") or (token.kind == "comma" and not depth):
            break
        last += 1
    return list(tokens[index + 1 : last])


def _left_side(piece: Sequence[Token]) -> tuple[Side, int] | None:
    """The longest end of the piece that is an expression, and where it begins.

    What stopped one attempt would stop every later one that begins before it, so each token is read about once.
    """
    start = 0
    while start < len(piece):
        parser = Parser(piece, at=start)
        try:
            node = parser.expression() if _may_begin(piece, start) else None
        except ParseError:
            node = None
        if node is not None and parser.at == len(piece):
            end = piece[parser.end - 1].end
            return Side(node, tuple(parser.units), piece[start].start, end, parser.ambiguous), start
        start = max(start + 1, parser.at - (node is None))
    return None


def _may_begin(piece: Sequence[Token], start: int) -> bool:
    """Whether nothing right before piece[start] would have to be calculated with."""
    if piece[start].kind not in ("number", "variable", "operator", "word"):
        return False
    if not start:
        return True
    before, token = piece[start - 1], piece[start]
    if before.kind in ("operator", "number", "variable", "junk", "verb"):
        return False
    if token.kind == "operator" and token.text == "-":
        return False
    if token.text == "(" and before.end == token.start:
        return False
    if before.kind != "word":
        return True
    if before.text == "of":
        whole = piece[start - 2] if start > 1 else None
        return whole is None or not (whole.kind == "number" or whole.text in ("%", ")") or whole.text in SHARES)
    moved = before.text in ("to", "from") and any(other.kind == "number" for other in piece[: start - 1])
    return before.text not in PARTIAL and not moved


def _right_side(piece: Sequence[Token]) -> tuple[Side, int] | None:
    """The expression that the piece begins with, and how many tokens it takes."""
    start = 0
    while start < min(4, len(piece)) and piece[start].kind == "word" and piece[start].text in LEADING:
        start += 1
    parser = Parser(piece, at=start)
    try:
        node = parser.expression()
    except (ParseError, RecursionError):
        return None
    end = piece[parser.end - 1].end
    if parser.at < len(piece):
        rest, last = piece[parser.at], piece[parser.at - 1]
        begins_anew = rest.text in ("(", "sqrt", "frac", "binom") and (last.kind == "word" or last.end < rest.start)
        if rest.kind in ("operator", "variable", "junk") and not begins_anew:
            return None
        compound = last.text == "and" or known(last.text)
        if rest.kind == "number" and (last.kind == "number" or (compound and any(map(known, parser.units)))):
            return None  # "12 3", or a compound such as 2 hours 30 minutes
    return Side(node, tuple(parser.units), piece[start].start, end, parser.ambiguous), parser.end
