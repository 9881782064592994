"""Which writing system a text is in, by the Unicode blocks of its letters."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator

from grpo_engine.reward.prose import prose

_RANGES = {
    "Latin": "A-Za-zÀ-ÖØ-öø-ɏḀ-ỿＡ-Ｚａ-ｚ",
    "Cyrillic": "Ѐ-ԯ",
    "Greek": "Ͱ-Ͽἀ-῾",
    "Arabic": "\u0600-\u06ff\u0750-\u077f\u08a0-\u08ff\ufb50-\ufdff\ufe70-\ufefc",
    "Hebrew": "\u0590-\u05ff\ufb1d-\ufb4f",
    "Devanagari": "\u0900-\u097f",
    "Bengali": "\u0980-\u09ff",
    "Gurmukhi": "\u0a00-\u0a7f",
    "Gujarati": "\u0a80-\u0aff",
    "Tamil": "\u0b80-\u0bff",
    "Telugu": "\u0c00-\u0c7f",
    "Kannada": "\u0c80-\u0cff",
    "Malayalam": "\u0d00-\u0d7f",
    "Sinhala": "\u0d80-\u0dff",
    "Thai": "\u0e00-\u0e7f",
    "Lao": "\u0e80-\u0eff",
    "Burmese": "\u1000-\u109f",
    "Georgian": "\u10a0-\u10ff",
    "Armenian": "\u0530-\u058f",
    "Ethiopic": "\u1200-\u137f",
    "Khmer": "\u1780-\u17ff",
    "Hangul": "\u1100-\u11ff\u3130-\u318f\uac00-\ud7af",
    "Kana": "\u3041-\u30ff\u31f0-\u31ff\uff66-\uff9f",
    "Han": "\u3005\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af",
}
UNSPACED = frozenset({"Thai", "Lao", "Burmese", "Khmer", "Kana", "Han"})
"""Scripts that put no blanks between words."""

UNSPACED_RANGES = "".join(_RANGES[name] for name in sorted(UNSPACED))
"""Their characters, for use inside [...] of a pattern."""
# Only Latin has ASCII characters: runs of the others are looked for where there are none.
_NO_ASCII = re.compile("[^\\x00-\\x7f][^\\x00-\\x7f]*")
_OTHER_RUN = re.compile("|".join(f"(?P<{name}>[{ranges}]+)" for name, ranges in _RANGES.items() if name != "Latin"))


class TextPattern:
    """A pattern over letters and digits of all scripts, in a faster form for text that is ASCII.

    Example: TextPattern("{letters}+") finds runs of letters. `{letters}`, `{letters_digits}` stand for one of scripts
    with blanks, `{unspaced}` for one character of the others; an alternative with the latter has nothing else.
    """

    def __init__(self, *alternatives: str) -> None:
        spaced = rf"[^\W{{}}_{UNSPACED_RANGES}]"
        every = {
            "letters": spaced.format(r"\d"),
            "letters_digits": spaced.format(""),
            "unspaced": f"[{UNSPACED_RANGES}]",
        }
        self._every = re.compile("|".join(alternatives).format(**every))
        in_ascii = [one for one in alternatives if "{unspaced}" not in one]  # no ASCII character is in such a script
        self._ascii = re.compile("|".join(in_ascii).format(letters="[A-Za-z]", letters_digits="[A-Za-z0-9]"))

    def for_text(self, text: str) -> re.Pattern[str]:
        """The form for this text and any part of it."""
        return self._ascii if text.isascii() else self._every

    def findall(self, text: str) -> list[str]:
        found: list[str] = self.for_text(text).findall(text)
        return found


WORD_PATTERNS = {name: re.compile(f"[{ranges}]{{2,}}") for name, ranges in _RANGES.items()}
"""Words of two letters and more in one script; single letters are variables."""
# Two words, or as many characters of a script without blanks: less is a name or a term.
_LEAST_UNITS = 2


def words_by_script(text: str) -> dict[str, float]:
    """Words in each script; two characters of a script without blanks count as one word, single letters as none.

    Example: words_by_script("the value x 是正确的") == {"Latin": 2.0, "Han": 2.0}.
    """
    counts: dict[str, float] = {}
    latin = WORD_PATTERNS["Latin"].findall(text)
    first_latin = text.find(latin[0]) if latin else 0
    for script, start, letters in _other_runs(text):
        if latin and start > first_latin:
            counts.setdefault("Latin", float(len(latin)))
        counts[script] = counts.get(script, 0.0) + (letters / 2 if script in UNSPACED else 1.0)
    return counts | ({"Latin": float(len(latin))} if latin else {})


def _other_runs(text: str) -> Iterator[tuple[str, int, int]]:
    """(script, place, letters) of each unbroken run in a script but Latin; single letters of scripts with blanks are
    variables and left out."""
    for stretch in _NO_ASCII.finditer(text):
        for match in _OTHER_RUN.finditer(text, *stretch.span()):
            script, letters = match.lastgroup or "", match.end() - match.start()
            if letters > 1 or script in UNSPACED:
                yield script, match.start(), letters


def _runs(text: str) -> Iterator[tuple[str, int]]:
    """(script, letters) of each unbroken run in order, Latin included."""
    latin = ((match.start(), "Latin", match.end() - match.start()) for match in WORD_PATTERNS["Latin"].finditer(text))
    others = ((start, script, letters) for script, start, letters in _other_runs(text))
    for _, script, letters in heapq.merge(latin, others):
        yield script, letters


def count_switches(text: str) -> int:
    """How often the running text goes over to another script for at least two words or characters.

    Han and kana are one script here; a name or term of one word inside another script is no switch.
    """
    if text.isascii():
        return 0
    switches, current = -1, ""
    pending, units = "", 0
    for script, letters in _runs(prose(text)):
        script = "Han" if script == "Kana" else script
        units = (units if script == pending else 0) + (letters if script in UNSPACED else 1)
        pending = script
        if units >= _LEAST_UNITS and script != current:
            switches, current = switches + 1, script
    return max(0, switches)
