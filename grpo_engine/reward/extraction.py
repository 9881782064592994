"""Find the answer in a completion: its text and where it stands, so that a page can highlight what was judged."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Method = Literal["after_think", "boxed", "tag", "last_number", "whole"]

MAX_CHARACTERS = 100_000
"""Of a longer answer text only the end is searched."""
MAX_NUMBER = 4_000
"""Characters of the longest number that is looked for."""

OPEN_TAG, CLOSE_TAG = "<think>", "</think>"
# \boxed{, an escaped character (whose brace does not count), or a brace.
_BRACES = re.compile(r"\\boxed\{|\\.|[{}]", re.DOTALL)
# A minus belongs to the number only where nothing stands before it that it could subtract from.
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]}])[-+\u2212])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,4}(?!\w))?"
    r"|(?:(?<![\w.)\]}])[-+\u2212])?(?<!\w)\.\d+"
)
_STATED = re.compile(r"\banswers?(?:\s+is|\s*[:=])\s*:?[\s*]*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?]\s+(?=[A-Z])|\n")


@dataclass(frozen=True, slots=True)
class Extraction:
    """The extracted answer. `text == completion[span[0]:span[1]]`; when nothing was found both are None."""

    text: str | None
    span: tuple[int, int] | None
    reason: str = ""
    """Why there is no answer, as the start of a sentence for the page."""


def extract(method: Method, text: str, *, thinking_opened: bool = False, tag: str = "answer") -> Extraction:
    """The answer inside `text`, surrounding white space removed.

    after_think  what follows the last </think>. Without any think tag the completion answered at once and counts
                 whole; with <think> opened (by it, or by the prompt: `thinking_opened`) and never closed there is none.
    boxed        the content of the last complete \\boxed{...}, braces nested.
    tag          the content of the last <tag>...</tag>.
    last_number  the last integer or decimal, with thousands separators, sign and exponent.
    whole        the completion.

    boxed, tag and last_number look only where after_think would: an answer in the thinking is none.
    """
    if method == "whole":
        return _stripped(text, 0, len(text), "The completion is empty")
    start, reason = _answer_start(text, thinking_opened)
    if start is None:
        return Extraction(None, None, reason)
    if method == "after_think":
        return _stripped(text, start, len(text), reason)
    shown = text[max(start, len(text) - MAX_CHARACTERS) :]
    found = _tagged(shown, tag) if method == "tag" else _METHODS[method](shown)
    return _moved(found, len(text) - len(shown), is_cut=len(text) - len(shown) > start)


def _moved(found: Extraction, by: int, *, is_cut: bool) -> Extraction:
    if found.span is None:
        where = f" in the last {MAX_CHARACTERS:,} characters" if is_cut else ""
        return Extraction(None, None, found.reason + where)
    return Extraction(found.text, (found.span[0] + by, found.span[1] + by))


def stated(found: Extraction) -> Extraction:
    """Of an answer that is prose, what it states: its last \\boxed{...}, else what follows the last "answer is" or
    "answer:" in its sentence, else all of it."""
    if found.text is None or found.span is None:
        return found
    end = found.text[-MAX_CHARACTERS:]
    inner = _boxed(end) if "\\boxed" in end else Extraction(None, None)
    if inner.text is None and (phrases := list(_STATED.finditer(end))):
        start = phrases[-1].end()
        stop = _SENTENCE_END.search(end, start)
        sentence = end[start : stop.start() if stop else len(end)].rstrip(" \t\n.*")
        inner = _stripped(end, start, start + len(sentence), "")
    return found if inner.text is None else _moved(inner, found.span[1] - len(end), is_cut=False)


def opens_thinking(prompt: str) -> bool:
    """Whether a chat template left <think> open, so that the completion starts inside it."""
    return prompt.rstrip().endswith(OPEN_TAG)


def _answer_start(text: str, thinking_opened: bool) -> tuple[int | None, str]:
    """Where the answer begins, None when it never does, and why there is none."""
    start = text.rfind(CLOSE_TAG)
    if start >= 0:
        return start + len(CLOSE_TAG), "Nothing follows </think>"
    if thinking_opened or OPEN_TAG in text:
        return None, "The thinking was never closed with </think>"
    return 0, "The completion is empty"


def _tagged(text: str, tag: str) -> Extraction:
    opening, closing = f"<{tag}>", f"</{tag}>"
    end = text.rfind(closing)
    start = text.rfind(opening, 0, max(end, 0))
    if start < 0:
        return Extraction(None, None, f"There is no complete {opening}{closing}")
    return _stripped(text, start + len(opening), end, f"The last {opening} is empty")


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
    """Only a stretch before the last digit is read, so that a long completion costs no more than a short one."""
    end = next((place + 1 for place in range(len(text) - 1, -1, -1) if text[place].isdecimal()), 0)
    start = max(0, end - MAX_NUMBER)
    numbers = list(_NUMBER.finditer(text, start, end + 1))
    if not numbers:
        return Extraction(None, None, "There is no number")
    if start and numbers[-1].start() == start:
        return Extraction(None, None, f"The last number is longer than {MAX_NUMBER:,} characters")
    return Extraction(numbers[-1].group(), numbers[-1].span())


def _stripped(text: str, start: int, end: int, reason: str) -> Extraction:
    answer = text[start:end]
    start += len(answer) - len(answer.lstrip())
    answer = answer.strip()
    if not answer:
        return Extraction(None, None, reason)
    return Extraction(answer, (start, start + len(answer)))


_METHODS: dict[str, Callable[[str], Extraction]] = {"boxed": _boxed, "last_number": _last_number}
