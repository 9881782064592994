"""The running text of a completion: code, formulas, addresses and tags cut out, in time linear in its length."""

from __future__ import annotations

import re

MAX_CHARACTERS = 200_000
"""How much of a completion the text metrics look at; some 50,000 tokens."""

# What begins something that is no prose. A backslash before anything else only escapes it. Every alternative begins
# with a fixed letter or sign, so that the engine can skip to the next of these.
_START = re.compile(
    r"```|~~~|``*|\$\$?|\\begin\{\w{1,20}\*?\}|\\[\[(]|\\[A-Za-z]+|\\.|https?://\S+|www\.\S+|</?[A-Za-z][\w-]{0,40}\s*/?>",
    re.DOTALL,
)
_CLOSERS = {"```": "```", "~~~": "~~~", "\\[": "\\]", "\\(": "\\)", "$$": "$$"}


def capped(text: str) -> tuple[str, str]:
    """The part of `text` that is judged, and a sentence that says so where it is not all of it."""
    if len(text) <= MAX_CHARACTERS:
        return text, ""
    return text[:MAX_CHARACTERS], f" Only the first {MAX_CHARACTERS:,} of {len(text):,} characters were judged."


def prose(text: str) -> str:
    """`text` with a blank instead of each code block and span, formula, address, TeX command and tag.

    A fence or a display formula that is never closed runs to the end. A lone dollar sign or backtick is text: a formula
    between dollars neither begins nor ends with a blank, and its end is followed by no digit, so that $3 and $4 stay.
    """
    kept: list[str] = []
    position = 0
    while (start := _START.search(text, position)) is not None:
        end = _end(text, start)
        lone = end == start.end() and start.group()[0] in "$`"
        kept += [text[position : start.start()], start.group() if lone else " "]
        position = end
    kept.append(text[position:])
    return "".join(kept)


def _end(text: str, start: re.Match[str]) -> int:
    """Where what begins at `start` ends; the end of `start` itself for what needs no closing.

    Linear: whatever is searched for and found is skipped, and what is not found ends the text or, for backticks and
    dollars, is looked for no farther than their next occurrence.
    """
    token = start.group()
    closer = _CLOSERS.get(token)
    if closer is None and token.startswith("\\begin"):
        closer = token.replace("begin", "end", 1)
    if closer is not None:
        end = text.find(closer, start.end())
        return len(text) if end < 0 else end + len(closer)
    if token[0] == "`":
        return _inline_end(text, start, text.find(token, start.end()), len(token))
    if token == "$":
        end = text.find("$", start.end())
        closes = end > start.end() and not text[start.end()].isspace() and not text[end - 1].isspace()
        return _inline_end(text, start, end if closes and not text[end + 1 : end + 2].isdigit() else -1, 1)
    return start.end()


def _inline_end(text: str, start: re.Match[str], end: int, width: int) -> int:
    """An inline span stays within its paragraph."""
    return start.end() if end < 0 or "\n\n" in text[start.end() : end] else end + width
