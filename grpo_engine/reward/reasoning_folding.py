"""Letter case taken off a text, place by place, for patterns that are looked for again and again.

A pattern in small letters finds in the folded text what it would find with re.IGNORECASE in the text itself, at the
same places and several times as fast: only where case counts can the engine skip to a letter with which a match begins.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

# What re.IGNORECASE takes for i, s and the Cyrillic letters of the patterns besides their capitals.
_OTHER_FORMS = {"İ": "i", "ı": "i", "ſ": "s", "\u1c80": "в", "\u1c82": "о", "\u1c84": "т", "\u1c85": "т"}
_OTHER_FORM = re.compile(f"[{''.join(_OTHER_FORMS)}]")
_TO_SMALL = str.maketrans(_OTHER_FORMS)


def fold(text: str) -> str:
    """The text in small letters; as long as the text, each character in its place."""
    if not text.isascii() and _OTHER_FORM.search(text) is not None:
        text = text.translate(_TO_SMALL)
    return text.lower()


def words_pattern(words: Sequence[str]) -> str:
    r"""A pattern like \b(?:one|two)\b to which the engine can skip: each alternative begins with its first letter."""
    return "|".join(rf"{word}(?<!\w{word})\b" for word in words)


def matches_from(
    pattern: re.Pattern[str], beginnings: Sequence[str], text: str, start: int = 0, end: int | None = None
) -> Iterator[re.Match[str]]:
    """What `pattern.finditer(text, start, end)` finds, where each match begins with one of the fixed `beginnings`."""
    last = len(text) if end is None else end
    places: list[int] = []
    for beginning in beginnings:
        place = text.find(beginning, start, last)
        while place >= 0:
            places.append(place)
            place = text.find(beginning, place + 1, last)
    free = start
    for place in sorted(places):
        if place >= free and (found := pattern.match(text, place, last)) is not None:
            yield found
            free = found.end()
