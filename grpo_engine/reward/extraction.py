"""Find the answer in a completion: its text and where it stands, so that a page can highlight what was judged."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Method = Literal["after_think", "boxed", "last_number", "whole"]

OPEN_TAG, CLOSE_TAG = "<think>", "</think>"
# \boxed{, an escaped character (whose brace does not count), or a brace.
_BRACES = re.compile(r"\\boxed\{|\\.|[{}]", re.DOTALL)
# A minus belongs to the number only where nothing stands before it that it could subtract from.
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]}])[-+\u2212])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,4}(?!\w))?"
    r"|(?:(?<![\w.)\]}])[-+\u2212])?(?<!\w)\.\d+"
)


@dataclass(frozen=True, slots=True)
class Extraction:
    """The extracted answer. `text == completion[span[0]:span[1]]`; when nothing was found both are None."""

    text: str | None
    span: tuple[int, int] | None
    reason: str = ""
    """Why there is no answer, as the start of a sentence for the page."""


def extract(method: Method, text: str, *, thinking_opened: bool = False) -> Extraction:
    """The answer inside `text`, surrounding white space removed.

    after_think  what follows the last </think>. Without any think tag the completion answered at once and counts
                 whole; with <think> opened (by it, or by the prompt: `thinking_opened`) and never closed there is none.
    boxed        the content of the last complete \\boxed{...}, braces nested.
    last_number  the last integer or decimal, with thousands separators, sign and exponent.
    whole        the completion.
    """
    if method == "after_think":
        return _after_think(text, thinking_opened)
    return _METHODS[method](text)


def opens_thinking(prompt: str) -> bool:
    """Whether a chat template left <think> open, so that the completion starts inside it."""
    return prompt.rstrip().endswith(OPEN_TAG)


def _after_think(text: str, thinking_opened: bool) -> Extraction:
    start = text.rfind(CLOSE_TAG)
    if start >= 0:
        return _stripped(text, start + len(CLOSE_TAG), len(text), "Nothing follows </think>")
    if thinking_opened or OPEN_TAG in text:
        return Extraction(None, None, "The thinking was never closed with </think>")
    return _whole(text)


def _boxed(text: str) -> Extraction:
    """One pass with a stack of open braces, so that a hostile completion cannot make it quadratic."""
    best: tuple[int, int] | None = None
    open_groups: list[int | None] = []  # where the content of a \\boxed starts; None for any other brace
    for token in _BRACES.finditer(text):
        if token.group() == "}":
            start = open_groups.pop() if open_groups else None
            if start is not None and (best is None or start > best[0]):
                best = (start, token.start())
        elif token.group().endswith("{") and token.group() != "\\{":
            open_groups.append(None if token.group() == "{" else token.end())
    if best is None:
        return Extraction(None, None, "There is no complete \\boxed{}")
    return _stripped(text, *best, "The last \\boxed{} is empty")


def _last_number(text: str) -> Extraction:
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return Extraction(None, None, "There is no number")
    return Extraction(numbers[-1].group(), numbers[-1].span())


def _whole(text: str) -> Extraction:
    return _stripped(text, 0, len(text), "The completion is empty")


def _stripped(text: str, start: int, end: int, reason: str) -> Extraction:
    answer = text[start:end]
    start += len(answer) - len(answer.lstrip())
    answer = answer.strip()
    if not answer:
        return Extraction(None, None, reason)
    return Extraction(answer, (start, start + len(answer)))


_METHODS: dict[str, Callable[[str], Extraction]] = {"boxed": _boxed, "last_number": _last_number, "whole": _whole}
