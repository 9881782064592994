r"""The text of an answer in one spelling: LaTeX dress, typographic signs and white space taken off. Linear time.

What only looks like a character (digits of other scripts, invisible and direction marks) is not mapped: a reader would
be deceived, so `strange_character` names it and the answer counts as wrong.
"""

from __future__ import annotations

import re
import unicodedata

OPENING, CLOSING = "([{", ")]}"

_SPACES = dict.fromkeys(map(ord, "\u00a0\u2002\u2003\u2007\u2008\u2009\u200a\u202f\u3000"), " ")
_SIGNS = {
    "\u2212": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": "/", "π": r"\pi ",
    "∞": r"\infty ", "√": r"\sqrt ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∈": r"\in ",
    "±": r"\pm ", "°": r"^\circ ", "º": r"^\circ ", "²": "^2", "³": "^3", "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}",
    "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅕": r"\frac{1}{5}", "⅛": r"\frac{1}{8}",
    "≈": r"\approx ", "’": "'", "“": '"', "”": '"',
}  # fmt: skip
_TYPOGRAPHY = str.maketrans({**{ord(sign): latex for sign, latex in _SIGNS.items()}, **_SPACES})

# Commands that only dress what they hold.
_DRESS = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|rm|bf)\s*\{([^{}]*)\}")
_SIZES = re.compile(r"\\(?:left|right|big|Big|bigl|bigr|Bigl|Bigr|displaystyle|limits)(?![a-zA-Z])\s*")
_THIN = re.compile(r"(?<!\\)\\[!,;: ]|~|\\q?quad(?![a-zA-Z])")
_SPELLINGS = (
    ("{,}", ","), (r"\geqslant", r"\ge"), (r"\leqslant", r"\le"), (r"\geq", r"\ge"), (r"\leq", r"\le"),
    (r"\neq", r"\ne"), (r"\dfrac", r"\frac"), (r"\tfrac", r"\frac"), (r"\cfrac", r"\frac"), (r"\degree", r"^\circ"),
    (r"^{\circ}", r"^\circ"), (r"\lbrace", r"\{"), (r"\rbrace", r"\}"), (r"\langle", "("), (r"\rangle", ")"),
    (r"\lparen", "("), (r"\rparen", ")"), (r"\%", "%"), (r"\$", "$"),
)  # fmt: skip
_FRAMES = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"), ('"', '"'))


def normalise(text: str) -> str:
    r"""Example: normalise(r"$\dfrac{1}{2}\text{ cm}.$") == r"\frac{1}{2} cm". Lines are kept apart by `;`."""
    text = unicodedata.normalize("NFC", text).translate(_TYPOGRAPHY)
    text = _undress(text)
    text = text.replace("\n", " " if r"\begin" in text else " ; ")
    while text != (plain := _DRESS.sub(r"\1", text)):
        text = plain
    text = _SIZES.sub("", text)
    for old, new in _SPELLINGS:
        text = text.replace(old, new)
    return _undress(" ".join(_THIN.sub(" ", text).split()))


def _undress(text: str) -> str:
    """Without the frames and full stops around it."""
    for _ in range(6):
        before = text
        text = text.strip().rstrip(".,;。").rstrip()
        for start, end in _FRAMES:
            inner = text[len(start) : len(text) - len(end)]
            if len(text) > len(start) + len(end) and text.startswith(start) and text.endswith(end):
                text = text if start in inner.replace(r"\$", "") else inner
        if text.startswith(r"\boxed{") and closing(text, len(r"\boxed{") - 1) == len(text) - 1:
            text = text[len(r"\boxed{") : -1]
        if text == before:
            break
    return text


def strange_character(text: str) -> str:
    """The first character that deceives the eye, as a sentence part for people; empty when there is none."""
    for character in text:
        if character in "\n\t\r" or (character.isascii() and character.isprintable()):
            continue
        kind = unicodedata.category(character)
        if kind in ("Cc", "Cf", "Co", "Cn", "Cs") or (kind == "Nd" and not character.isascii()):
            what = "no ASCII digit" if kind == "Nd" else "an invisible or control character"
            return f"U+{ord(character):04X} is {what}"
    return ""


def closing(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`, brackets of all kinds nested; -1 when none does."""
    depth = 0
    for index in range(start, len(text)):
        if text[index] in OPENING:
            depth += 1
        elif text[index] in CLOSING:
            depth -= 1
            if depth == 0:
                return index
    return -1


def is_balanced(text: str) -> bool:
    r"""Whether every { has its }, escaped ones aside, and \left its \right."""
    depth = 0
    for token in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(token.group(), 0)
        if depth < 0:
            return False
    return depth == 0


_SEPARATOR = re.compile(r"[,;]|\\cup(?![a-zA-Z])|(?<=[\s\d)\]}])(?:and|or)(?=[\s\d(\[\\{-])|[(\[{)\]}]")


def split_top(text: str) -> list[str]:
    """The pieces between commas, semicolons, "and" and "or" that stand in no bracket, empty ones left out.

    Example: split_top("x=1, (2,3) and 4") == ["x=1", "(2,3)", "4"]"""
    pieces, depth, start = [], 0, 0
    for token in _SEPARATOR.finditer(text):
        sign = token.group()
        if sign in OPENING:
            depth += 1
        elif sign in CLOSING:
            depth -= 1
        elif depth == 0:
            pieces.append(text[start : token.start()])
            start = token.end()
    pieces.append(text[start:])
    return [piece.strip() for piece in pieces if piece.strip()]
