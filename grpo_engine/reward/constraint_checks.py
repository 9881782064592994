"""Whether a text keeps a constraint, and what was found in it."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpo_engine.reward.constraints import (
    Constraint,
    Count,
    EndsWith,
    ForbiddenCharacters,
    ForbiddenWords,
    Json,
    JsonSchema,
    Keywords,
    Language,
    LetterCase,
    Quotation,
    Sections,
    StartsWith,
)
from grpo_engine.reward.json_schemas import MAX_JSON_CHARACTERS, find_misfit
from grpo_engine.reward.language_consistency import MIN_WORDS, words_by_language
from grpo_engine.reward.phrases import find_phrase
from grpo_engine.reward.prose import prose
from grpo_engine.reward.scripts import TextPattern

_WORD = TextPattern("{letters_digits}+(?:['’_-]{letters_digits}+)*", "{unspaced}")
# The end of a sentence: its sign, closing marks, and white space or the end of the text; no decimal point. A run of
# signs is tried once, from its beginning, so that the time stays linear.
_SENTENCE_END = re.compile(r"(?<![.!?…])[.!?…]++[\"'”’)\]*]{0,3}(?=\s|$)|[。！？]+")
_PARAGRAPH_END = re.compile(r"\n[ \t]*\n\s*")
_HEADING = re.compile(r"^ {0,3}#{1,6}[ \t]+(\S.*)$", re.MULTILINE)
_BULLET = re.compile(r"^[ \t]*[-*+•][ \t]+\S", re.MULTILINE)
_NUMBERED = re.compile(r"^[ \t]*\d{1,4}[.)][ \t]+\S", re.MULTILINE)
_PLACEHOLDER = re.compile(r"\[[^\[\]\n]{1,80}\]")
_INVISIBLE = re.compile("[\x00\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")
_FENCED = re.compile(r"```[A-Za-z]{0,10}[ \t]*\n(.*)\n[ \t]*```", re.DOTALL)
_LEAST_IN_LANGUAGE = 0.9


@dataclass(frozen=True, slots=True)
class Checked:
    """One constraint's verdict."""

    kept: bool | None
    """None: the text does not let it be judged."""
    found: str
    """What was found, without full stop."""


def check(constraint: Constraint, text: str, num_tokens: int) -> Checked:
    """`num_tokens`: of the whole completion; everything else is counted in `text`, which has at least one character."""
    match constraint:
        case Count():
            number = num_tokens if constraint.kind == "token_count" else COUNTERS[constraint.kind](text)
            return _within(number, constraint.at_least, constraint.at_most, constraint.kind.removesuffix("_count"))
        case Keywords():
            return _keywords(constraint, text.casefold())
        case ForbiddenWords():
            return _forbidden(constraint, text)
        case ForbiddenCharacters():
            present = sorted(set(constraint.characters) & set(text))
            return Checked(not present, f"{''.join(present)} stands there" if present else "none stands there")
        case LetterCase():
            return _letter_case(constraint, text)
        case StartsWith():
            return _edge(text.casefold().startswith(constraint.phrase.casefold().strip()), "begins", text[:60])
        case EndsWith():
            return _edge(text.casefold().endswith(constraint.phrase.casefold().strip()), "ends", text[-60:])
        case Sections():
            return _sections(constraint, text)
        case Quotation():
            return _edge(len(text) > 2 and text[0] in '"“„«' and text[-1] in '"”“»', "is wrapped", text[:60])
        case Json():
            return _json(text)[0]
        case JsonSchema():
            return _json_schema(constraint, text)
        case Language():
            return _language(constraint, text)


def _num_sentences(text: str) -> int:
    """Sentence ends, and one more where words follow the last."""
    ends = list(_SENTENCE_END.finditer(text))
    return len(ends) + bool(_WORD.findall(text[ends[-1].end() :] if ends else text))


COUNTERS: dict[str, Callable[[str], int]] = {
    "word_count": lambda text: len(_WORD.findall(text)),
    "sentence_count": _num_sentences,
    "paragraph_count": lambda text: len(_PARAGRAPH_END.split(text)),
    "character_count": len,
    "line_count": lambda text: sum(bool(line.strip()) for line in text.split("\n")),
    "heading_count": lambda text: len(_HEADING.findall(text)),
    "bullet_count": lambda text: len(_BULLET.findall(text)),
    "numbered_count": lambda text: len(_NUMBERED.findall(text)),
    "placeholder_count": lambda text: len(_PLACEHOLDER.findall(text)),
}


def _within(number: int, at_least: int | None, at_most: int | None, unit: str) -> Checked:
    if at_least is not None and number < at_least:
        return Checked(False, f"{number} {unit}s, at least {at_least} wanted")
    if at_most is not None and number > at_most:
        return Checked(False, f"{number} {unit}s, at most {at_most} wanted")
    return Checked(True, f"{number} {unit}s")


def _keywords(constraint: Keywords, text: str) -> Checked:
    for word in constraint.words:
        number = len(find_phrase(text, word.casefold()))
        said = _within(number, constraint.at_least, constraint.at_most, "time")
        if not said.kept:
            return Checked(False, f"{word!r} stands there {said.found}")
    return Checked(True, "every keyword stands there")


def _forbidden(constraint: ForbiddenWords, text: str) -> Checked:
    plain = unicodedata.normalize("NFKC", _INVISIBLE.sub("", text)).casefold()
    for word in constraint.words:
        if find_phrase(plain, word.casefold()):
            return Checked(False, f"{word!r} stands there")
    return Checked(True, "none stands there")


def _letter_case(constraint: LetterCase, text: str) -> Checked:
    wrong = str.islower if constraint.case == "upper" else str.isupper
    if not any(map(str.isalpha, text)):
        return Checked(None, "there are no letters")
    letter = next(filter(wrong, text), None)
    return Checked(letter is None, f"{letter!r} stands there" if letter else f"all letters are {constraint.case} case")


def _edge(kept: bool, verb: str, shown: str) -> Checked:
    return Checked(kept, f"it {verb} so" if kept else f"it is “{' '.join(shown.split())}”")


def _sections(constraint: Sections, text: str) -> Checked:
    titles = iter([title.strip(" #\t*:").casefold() for title in _HEADING.findall(text)])
    for wanted in constraint.titles:
        if wanted.strip().casefold() not in titles:  # takes titles up to and with the one found
            return Checked(False, f"no heading {wanted!r} in its place")
    return Checked(True, "all sections stand there in order")


def _json(text: str) -> tuple[Checked, Any]:
    fenced = _FENCED.fullmatch(text)
    try:
        return Checked(True, "it is JSON"), json.loads(fenced[1] if fenced else text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        return Checked(False, f"no JSON: {str(error)[:100]}"), None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _json_schema(constraint: JsonSchema, text: str) -> Checked:
    if len(text) > MAX_JSON_CHARACTERS:
        return Checked(False, f"more than {MAX_JSON_CHARACTERS:,} characters")
    said, value = _json(text)
    if not said.kept:
        return said
    misfit = find_misfit(value, constraint.schema_)
    return Checked(not misfit, misfit or "it fits the schema")


def _language(constraint: Language, text: str) -> Checked:
    words = words_by_language(constraint.language, prose(text))
    words.pop("", None)
    total = sum(words.values())
    if total < MIN_WORDS:
        return Checked(None, f"only {total:.0f} words")
    share = words.get(constraint.language, 0.0) / total
    return Checked(share >= _LEAST_IN_LANGUAGE, f"{share:.0%} of the words are in {constraint.language!r}")
