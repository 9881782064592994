"""A variable that a solution gives two values.

A solution may give a variable a new value (loops, cases, another problem) and may correct itself: where words say so,
nothing is held against it. A variable of many values counts or is tried out, one of a power has several roots, and a
capital letter may name a quantity of several figures.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from grpo_engine.reward.reasoning_claims import Conflict
from grpo_engine.reward.reasoning_folding import fold, words_pattern
from grpo_engine.reward.reasoning_quantities import agree, quantity

# Begins with what stands before a name, to which the engine can skip: held against the text behind a line's end.
_ASSIGNED = re.compile(
    r"[\s(,;:$[](?P<name>[a-zα-ω]|[A-Za-zΑ-ω](?:_\{?\w{1,8}\}?|[0-9]))[ \t]*(?:&?=|\bequals\b)"
    r"(?=[ \t]*(?P<value>[^\n,;:<>≤≥]{1,120}))"
)
_SENTENCE_END = re.compile(
    r"\.(?![0-9])|\$(?![0-9])|\\[\])\\]|⇒|→|=>|"
    + words_pattern(["and", "so", "which", "because", "since", "then", "when", "for"])
)
_LITERAL = re.compile(
    r"[ \t$€£({]*(?P<number>[-−]?(?:\\[dt]?frac\{-?[0-9]{1,9}\}\{[0-9]{1,9}\}|\.?[0-9][0-9,.]*(?:/[0-9]+)?))"
    r"[ \t})%°]*(?:\\?%)?(?P<rest>.*)",
    re.DOTALL,
)
_GOES_ON = re.compile(r"[ \t]*(?:[-+*/^×·÷−(\\!]|[a-zA-Z](?![\w'])|times|of\b|or\b)")
_ANEW = re.compile(
    r"\b(?:let|lets|suppose|assume|if|case|when|where|now|new|newly|next|another|other|instead|becomes?|update[ds]?|"
    r"check|verify|test|try|trying|wait|actually|alternatively|define|problem|question|example|part|for|either|or|plug|"
    r"set|setting|mistake|error|wrong|incorrect|not|no|step|iteration|loop|round|increase[sd]?|decrease[sd]?|add|"
    r"initially|originally|finally|after|before|again|also|similarly|respectively|maximum|minimum|year|day|mod|at)\b|"
    r"[?≤≥≠]|\n\s*(?:\(?[a-z0-9]{1,2}[).]\s|#|\*\*)"
)
"""To be held against folded text."""
_MAX_COMPARED = 50
_OPERATORS = "+-*/^=×·÷−<>≤≥|_"


def two_values(text: str) -> tuple[int, Conflict | None]:
    """How many variables were compared with themselves, and the first that has two values."""
    given, folded = _values_of_names(text), fold(text)
    compared = 0
    for name, values in given.items():
        if len(values) < 2 or len({value for value, _, _ in values}) > 2:
            continue
        if compared == _MAX_COMPARED:
            break
        compared += 1
        conflict = _conflict(text, folded, name, values)
        if conflict is not None:
            return compared, conflict
    return compared, None


def _values_of_names(text: str) -> dict[str, list[tuple[str, int, int]]]:
    """Each name with its values in order: the value, where its name begins, and where it ends."""
    given: dict[str, list[tuple[str, int, int]]] = {}
    if "=" not in text and "equals" not in text:
        return given
    for match in _ASSIGNED.finditer(f"\n{text}"):
        found = _assigned_value(match["value"])
        start = match.start("name") - 1
        before = text[max(0, start - 3) : start].rstrip(" $\t")
        if found is not None and before[-1:] not in tuple(_OPERATORS):
            place = start, match.start("value") - 1 + found[1]
            given.setdefault(match["name"].replace("{", "").replace("}", ""), []).append((found[0], *place))
    return given


def _assigned_value(rest: str) -> tuple[str, int] | None:
    """The number at the end of "10 + 5 = 15 apples" and where it ends; None where it does not end in a number."""
    end = _SENTENCE_END.search(rest)
    said = rest[: end.start()] if end else rest
    begin = max(said.rfind("="), said.rfind("≈")) + 1
    literal = _LITERAL.match(said, begin)
    if literal is None or _GOES_ON.match(literal["rest"]):
        return None
    return quantity(literal["number"].rstrip(".,")), literal.end("number")


def _conflict(text: str, folded: str, name: str, values: Sequence[tuple[str, int, int]]) -> Conflict | None:
    """The first two neighbours that differ with nothing between them that begins anew."""
    for (first, _, end), (second, start, stop) in pairwise(values):
        if agree(first, second) and first.startswith("-") == second.startswith("-"):
            continue
        after = text[stop : stop + 12]
        if _ANEW.search(folded, end, start) or _ANEW.search(folded, max(0, start - 25), start) or ":" in after[:2]:
            continue
        if re.match(r"\s*(?:or|and)\b|\s*\?", after) or re.search(r",\s*(?:and |or )?\$?$", text[end:start]):
            continue
        if _has_several_values(text, name):
            return None
        return Conflict(f"{name} is given two values, {first} and {second}.", start, stop)
    return None


def _has_several_values(text: str, name: str) -> bool:
    """The text takes a power of the variable, has it in a set, or speaks of roots or solutions."""
    if ("roots" in text or "solutions" in text) and re.search(r"\b(?:roots|solutions)\b", text):
        return True
    return re.search(rf"{re.escape(name)}\s?(?:\^|²|\*\*|\\in\b|\\mapsto)", text) is not None
