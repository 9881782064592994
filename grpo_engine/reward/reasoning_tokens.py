"""Tokens of a worked solution: numbers, operators, relations, words, breaks, each with its place in the text.

One regular expression walks the text once, so that no text can make it slow. Plain text, markdown and LaTeX are read
alike. What is not known becomes a break or junk, never a guess: look-alike digits of other alphabets are no numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Literal, NamedTuple

from grpo_engine.reward.reasoning_words import ABOUT

Kind = Literal["number", "operator", "relation", "verb", "word", "variable", "comma", "break", "newline", "junk"]
MAX_DIGITS = 40

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789")
_VULGAR = {"½": (1, 2), "¼": (1, 4), "¾": (3, 4), "⅓": (1, 3), "⅔": (2, 3), "⅕": (1, 5), "⅛": (1, 8)}
_LETTER = r"[^\W\d_⁰¹²³⁴⁵⁶⁷⁸⁹½¼¾⅓⅔⅕⅛]"
_PATTERNS = {
    "mark": r"<<[^<>\n]{0,200}>>",
    "list": r"(?<![^\n])[ \t]*(?:[-*•+]|[0-9]{1,3}[.)]|\([0-9a-z]{1,2}\)|[a-z][.)]|\#{1,6}|>)[ \t]+",
    "newline": r"\n|\\\\(?:\[[^\]\n]{0,20}\])?",
    "environment": r"\\(?:begin|end)\{[^}\n]{0,40}\}",
    "command": r"\\[A-Za-z]+|\\.",
    "ordinal": r"[0-9]+(?:st|nd|rd|th)\b",
    # Times, ratios, versions, 0.333...; and 0,15: a decimal comma, or numbers of a list.
    "junk": r"[0-9]+(?::[0-9]+)+|[0-9]+(?:\.[0-9]+){2,}|[0-9]*\.[0-9]+(?:\.\.|…|\\[lc]?dots)"
    r"|(?<!gcd\()(?<!lcm\()(?![0-9]{1,3}(?:,[0-9]{3})+(?![0-9,]))[0-9]+(?:,[0-9]+)+",
    "number": r"(?:[0-9]{1,3}(?:(?:,|\{,\})[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3}(?!\w))?"
    r"|\.[0-9]+",
    "vulgar": "[½¼¾⅓⅔⅕⅛]",
    "superscript": "[⁰¹²³⁴⁵⁶⁷⁸⁹]+",
    "cross": r"(?:(?<=[1-9])|(?<=[0-9]0))[xX](?=[0-9])",
    "verb": r"\b(?:(?:is|are|was) equal to|equals?(?: to)?|is|are|was|makes|gives)\b",
    "word": _LETTER + r"+(?:['’]" + _LETTER + r"+)*(?:_\{?\w{1,20}\}?|(?<=[A-Za-z])[0-9]{1,3}(?![0-9]))?",
    "other_relation": r"={1,4}>|-{1,4}>|<=|>=|!=|:=|[→⇒⟹≠≤≥<>≡∝∈]",
    "relation": "==?|[≈≃≅]",
    "bold": r"(?<![\w)\]])\*\*|\*\*(?![\w(\[\\])",
    "operator": r"\*\*|//|[-+*/^()\[\]{}%×÷·⋅∙∗−–⁄∕√]",
    "factorial": r"!(?=\s*[=+\-*/)^×·÷\\])",
    "currency": r"[$€£¥₹](?=\s?-?\s?(?:\.?[0-9]|<<))",
    "comma": ",",
    "skip": "[ \t\r\u00a0\u202f\u2009&`°\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]+",
    "break": r"(?s:.)",
}
_TOKEN = re.compile("|".join(f"(?P<{name}>{pattern})" for name, pattern in _PATTERNS.items()))

_OPERATORS = {"×": "*", "·": "*", "⋅": "*", "∙": "*", "∗": "*", "⁄": "/", "∕": "/", "−": "-", "–": "-",
              "**": "^", "√": "sqrt", "[": "(", "]": ")", "{": "(", "}": ")"}  # fmt: skip
_COMMANDS: dict[str, tuple[Kind, str] | None] = {
    r"\times": ("operator", "*"), r"\cdot": ("operator", "*"), r"\ast": ("operator", "*"), r"\*": ("operator", "*"),
    r"\div": ("operator", "÷"), r"\%": ("operator", "%"), r"\frac": ("operator", "frac"), r"\{": ("operator", "("),
    r"\}": ("operator", ")"), r"\dfrac": ("operator", "frac"), r"\tfrac": ("operator", "frac"),
    r"\cfrac": ("operator", "frac"), r"\sqrt": ("operator", "sqrt"), r"\binom": ("operator", "binom"),
    r"\text": ("operator", "text"), r"\mathrm": ("operator", "text"), r"\textbf": ("operator", "text"),
    r"\mbox": ("operator", "text"), r"\approx": ("relation", "≈"), r"\simeq": ("relation", "≈"),
    r"\pi": ("variable", "π"), r"\boxed": None, r"\left": None, r"\right": None, r"\displaystyle": None, r"\,": None,
    r"\;": None, r"\!": None, r"\:": None, r"\ ": None, r"\quad": None, r"\qquad": None, r"\$": None, r"\&": None,
    r"\[": ("break", ""), r"\]": ("break", ""), r"\(": ("break", ""), r"\)": ("break", ""),
}  # fmt: skip
_BREAKING = frozenset([
    r"\neq", r"\ne", r"\le", r"\leq", r"\ge", r"\geq", r"\lt", r"\gt", r"\Rightarrow", r"\implies", r"\to",
    r"\rightarrow", r"\therefore", r"\because", r"\iff", r"\equiv",
])  # fmt: skip
_PLAIN: dict[str, Kind] = {name: name for name in ("relation", "comma", "newline", "junk")}
_PUNCTUATION = frozenset('.:;?!,—…|"“”#，。；：？！、（）')


class Token(NamedTuple):
    """One token. `text` is its meaning ("*" for \\times), `start` and `end` its place."""

    kind: Kind
    text: str
    start: int
    end: int
    value: Fraction | None = None
    decimals: int = 0
    """Digits after the point, for rounding."""


def tokenize(text: str, start: int = 0, end: int | None = None) -> list[Token]:
    """The tokens of text[start:end]. A line that begins with a relation continues the line before it."""
    tokens: list[Token] = []
    for token in _raw(text, start, len(text) if end is None else end):
        if token.kind == "relation" and tokens and tokens[-1].kind == "newline":
            while tokens and tokens[-1].kind == "newline":
                tokens.pop()
            token = token._replace(text=token.text + "\n")
        if token.kind == "newline" and tokens and tokens[-1].kind == "relation":
            continue
        tokens.append(token)
    return [_settled(tokens, index) for index in range(len(tokens))]


def _raw(text: str, start: int, end: int) -> Iterator[Token]:
    for match in _TOKEN.finditer(text, start, end):
        name, found = match.lastgroup or "break", match.group()
        kind: Kind | None = None
        meaning: str = found
        value, decimals = None, 0
        match name:
            case "number":
                kind, (value, decimals) = "number", _number(found)
                kind = "number" if value is not None else "junk"
            case "vulgar":
                kind, value, decimals = "number", Fraction(*_VULGAR[found]), -1
            case "superscript":
                kind, meaning = "operator", "^" + found.translate(_SUPERSCRIPTS)
            case "command":
                said = _COMMANDS.get(found, ("break" if found in _BREAKING else "junk", found))
                if said is None:
                    continue
                kind, meaning = said
            case "word":
                kind = "variable" if _is_variable(text, match) else "word"
                meaning = found if kind == "variable" else found.lower()
            case "operator":
                kind, meaning = "operator", _OPERATORS.get(found, found)
            case "factorial" | "cross":
                kind, meaning = "operator", "!" if name == "factorial" else "*"
            case "verb":
                kind, meaning = "verb", found.lower()
            case "relation" | "comma" | "newline" | "junk":
                kind = _PLAIN[name]
            case "other_relation" | "environment":
                kind = "break"
            case "break":
                kind = "break" if found in _PUNCTUATION or found == "$" else "junk"
            case "ordinal":
                kind = "word"
            case "list":
                kind, meaning = "break", "-" if found.strip() == "-" else ""
            case _:  # calculator marks are read apart; bold, currency and space mean nothing here
                continue
        yield Token(kind, meaning, match.start(), match.end(), value, decimals)


def _number(found: str) -> tuple[Fraction | None, int]:
    plain = found.replace("{,}", "").replace(",", "")
    if len(plain) > MAX_DIGITS:
        return None, 0
    mantissa = plain.lower().partition("e")[0]
    if len(mantissa) == len(plain):
        return Fraction(plain), len(mantissa.partition(".")[2])
    return (Fraction(plain), 0) if abs(int(plain.lower().partition("e")[2])) <= MAX_DIGITS else (None, 0)


def _is_variable(text: str, match: re.Match[str]) -> bool:
    """One letter, with or without an index; but "a" before another word is an article, and so is "I" no name."""
    found = match.group()
    if len(found) > 1 and found[1].isalpha():
        return False
    if found in ("a", "A", "I"):
        after = text[match.end() : match.end() + 2]
        return not (len(after) == 2 and after[0] == " " and after[1].isalpha())
    return found.isascii() or "Α" <= found[0] <= "ω"


def _settled(tokens: list[Token], index: int) -> Token:
    """A verb such as "is" is a relation only between a number and a number ("is about 3" too)."""
    token = tokens[index]
    if token.kind != "verb":
        return token
    before = tokens[index - 1] if index else None
    following = index + 1
    if following < len(tokens) and tokens[following].text in ABOUT:
        following += 1
    after = tokens[following] if following < len(tokens) else None
    ends = before is not None and (before.kind == "number" or before.text in (")", "%"))
    begins = after is not None and (after.kind == "number" or after.text in ("-", "frac"))
    return token if ends and begins else token._replace(kind="word")
