"""A variable that a solution gives two values.

A solution may give a variable a new value (loops, cases, another problem) and may correct itself: where words say so,
nothing is held against it. A variable of many values counts or is tried out, one of a power has several roots, and a
capital letter may name a quantity of several figures.
"""

from __future__ import annotations

import re
from itertools import pairwise

from grpo_engine.reward.reasoning_claims import Conflict
from grpo_engine.reward.reasoning_quantities import agree, quantity

_ASSIGNED = re.compile(
    r"(?:^|(?<=[\s(,;:$[]))(?P<name>[a-zα-ω]|[A-Za-zΑ-ω](?:_\{?\w{1,8}\}?|[0-9]))[ \t]*(?:&?=|\bequals\b)[ \t]*"
    r"(?=(?P<value>[^\n,;:<>≤≥]{1,120}))",
    re.MULTILINE,
)
_SENTENCE_END = re.compile(
    r"\.(?![0-9])|\$(?![0-9])|\\[\])\\]|\b(?:and|so|which|because|since|then|when|for)\b|[⇒→]|=>"
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
    r"[?≤≥≠]|\n\s*(?:\(?[a-z0-9]{1,2}[).]\s|#|\*\*)",
    re.IGNORECASE,
)
_MAX_COMPARED = 50
_OPERATORS = "+-*/^=×·÷−<>≤≥|_"


def two_values(text: str) -> tuple[int, Conflict | None]:
    """How many variables were compared with themselves, and the first that has two values."""
    given: dict[str, list[tuple[str, int, int]]] = {}
    for match in _ASSIGNED.finditer(text):
        found = _assigned_value(match["value"])
        before = text[max(0, match.start("name") - 3) : match.start("name")].rstrip(" $\t")
        if found is not None and before[-1:] not in tuple(_OPERATORS):
            place = match.start("name"), match.start("value") + found[1]
            given.setdefault(match["name"].replace("{", "").replace("}", ""), []).append((found[0], *place))
    compared = 0
    for name, values in given.items():
        if len(values) < 2 or len({value for value, _, _ in values}) > 2:
            continue
        if compared == _MAX_COMPARED:
            break
        compared += 1
        conflict = _conflict(text, name, values)
        if conflict is not None:
            return compared, conflict
    return compared, None


def _assigned_value(rest: str) -> tuple[str, int] | None:
    """The number at the end of "10 + 5 = 15 apples" and where it ends; None where it does not end in a number."""
    end = _SENTENCE_END.search(rest)
    said = rest[: end.start()] if end else rest
    begin = max(said.rfind("="), said.rfind("≈")) + 1
    literal = _LITERAL.match(said, begin)
    if literal is None or _GOES_ON.match(literal["rest"]):
        return None
    return quantity(literal["number"].rstrip(".,")), literal.end("number")


def _conflict(text: str, name: str, values: list[tuple[str, int, int]]) -> Conflict | None:
    """The first two neighbours that differ with nothing between them that begins anew."""
    if re.search(rf"{re.escape(name)}\s?(?:\^|²|\*\*|\\in\b|\\mapsto)|\b(?:roots|solutions)\b", text):
        return None
    for (first, _, end), (second, start, stop) in pairwise(values):
        if agree(first, second) and first.startswith("-") == second.startswith("-"):
            continue
        after = text[stop : stop + 12]
        if _ANEW.search(text, end, start) or _ANEW.search(text, max(0, start - 25), start) or ":" in after[:2]:
            continue
        if re.match(r"\s*(?:or|and)\b|\s*\?", after) or re.search(r",\s*(?:and |or )?\$?$", text[end:start]):
            continue
        return Conflict(f"{name} is given two values, {first} and {second}.", start, stop)
    return None
