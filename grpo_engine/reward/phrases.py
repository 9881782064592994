"""Where fixed phrases stand in a text: many phrases, few of which occur."""

from __future__ import annotations

from collections.abc import Iterable


def find_phrases(text: str, phrases: Iterable[str]) -> list[tuple[int, int]]:
    """The stretches of `text` that phrases cover, in order; overlapping ones are one stretch.

    A phrase matches as whole words; one in a script without blanks matches anywhere. Linear in the text for each
    phrase: most are absent, and `in` tells that fastest.
    """
    found = sorted(span for phrase in phrases if phrase in text for span in find_phrase(text, phrase))
    stretches: list[tuple[int, int]] = []
    for start, stop in found:
        if stretches and start < stretches[-1][1]:
            stretches[-1] = (stretches[-1][0], max(stop, stretches[-1][1]))
        else:
            stretches.append((start, stop))
    return stretches


def find_phrase(text: str, phrase: str) -> list[tuple[int, int]]:
    """Where one phrase stands, in order and without overlap."""
    anywhere = phrase[0] >= "\u2e80"
    spans, start = [], text.find(phrase)
    while start >= 0:
        stop = start + len(phrase)
        if anywhere or not (_in_word(text, start - 1) or _in_word(text, stop)):
            spans.append((start, stop))
        start = text.find(phrase, stop)
    return spans


def _in_word(text: str, index: int) -> bool:
    return 0 <= index < len(text) and text[index].isalnum()
