"""Where fixed phrases stand in a text: many phrases, few of which occur."""

from __future__ import annotations

from collections.abc import Iterable

# Bytes of ASCII letters and digits as they are, all others as a blank.
_WORDS_ONLY = bytes(code if code < 128 and chr(code).isalnum() else ord(" ") for code in range(256))


class Phrases:
    """Phrases to be looked for in many texts, by the words that a text must have for one of them."""

    def __init__(self, phrases: Iterable[str]) -> None:
        self._of_word: dict[str, list[str]] = {}
        self._wordless: list[str] = []
        for phrase in phrases:
            words = [] if _matches_anywhere(phrase) else words_in(phrase)
            # Long words are rare ones, and so are last ones.
            kept = self._of_word.setdefault(max(reversed(words), key=len), []) if words else self._wordless
            kept.append(phrase)
        self._words = frozenset(self._of_word)

    def find(self, text: str, words: Iterable[str] | None = None) -> list[tuple[int, int]]:
        """As find_phrases; `words`: what `words_in(text)` gives, for who looks for several sets of phrases."""
        known = self._words.intersection(words_in(text) if words is None else words)
        return find_phrases(text, [*self._wordless, *(phrase for word in known for phrase in self._of_word[word])])


def words_in(text: str) -> list[str]:
    """The runs of ASCII letters and digits. A phrase that stands somewhere as whole words has its own among them."""
    return text.encode("ascii", "replace").translate(_WORDS_ONLY).decode().split()


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
    anywhere = _matches_anywhere(phrase)
    spans, start = [], text.find(phrase)
    while start >= 0:
        stop = start + len(phrase)
        if anywhere or not (_in_word(text, start - 1) or _in_word(text, stop)):
            spans.append((start, stop))
        start = text.find(phrase, stop)
    return spans


def _matches_anywhere(phrase: str) -> bool:
    """It is in a script without blanks."""
    return phrase[0] >= "\u2e80"


def _in_word(text: str, index: int) -> bool:
    return 0 <= index < len(text) and text[index].isalnum()
