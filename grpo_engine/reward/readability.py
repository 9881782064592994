"""Readability: sentence and word statistics, paragraphs, markdown that renders as meant, and clean characters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from importlib import metadata
from itertools import chain
from typing import TYPE_CHECKING

from grpo_engine.config_rewards import ReadabilityReward
from grpo_engine.reward import markdown, scripts
from grpo_engine.reward import prose as prose_module
from grpo_engine.reward.markdown import find_markdown_faults
from grpo_engine.reward.metric import Judgement, Metric
from grpo_engine.reward.prose import capped, prose
from grpo_engine.reward.scripts import TextPattern
from grpo_engine.reward.versions import module_source, version_of
from grpo_engine.types import Completion, Prompt

if TYPE_CHECKING:
    from pyphen import Pyphen

MIN_WORDS = 8
"""Below this many words of prose the metric abstains."""
WEIGHTS = {"sentences": 0.25, "words": 0.2, "paragraphs": 0.15, "markdown": 0.2, "characters": 0.2}
"""Of the five marks, each in [0, 1], whose weighted mean is the value; a mark that does not apply is left out."""

_WORD = TextPattern("{letters}+(?:['’]{letters}+)*", "{unspaced}{{1,2}}", "[0-9][0-9.,]*")
_SENTENCE_END = re.compile(r"[.!?…:。！？](?:(?<=[。！？])|[\"')\]*_]{0,3}\s)\s*")
_PARAGRAPH_END = re.compile(r"\n\s*\n|\n(?=[ \t]*(?:[-*+•#>|]|\d{1,3}[.)]))")
# Control characters but white space, the replacement character, private use, invisible and direction marks, surrogates.
_UNCLEAN = re.compile(
    "[\x00-\x08\x0e-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ud800-\udfff\ue000-\uf8ff\ufeff\ufffd]"
)
_LONG_WORD = 30
# Mean words of a sentence that read well; 0 at the end of the range.
_BEST_SENTENCE, _WORST_SENTENCE = (4.0, 25.0), 60.0
# Words of the longest paragraph, the same way.
_PARAGRAPH = (150, 600)
# Flesch's reading ease: 50 is the border of what Flesch 1948 calls fairly difficult.
_EASY = 50.0


def metric(config: ReadabilityReward) -> Metric:
    """Weighted mean of five marks.

    sentences   mean length of a sentence of the running text: full marks from 4 to 25 words, none at 60.
    words       Flesch's reading ease (1948), syllables by pyphen's hyphenation: full marks from 50, none at 0; only
                where the words are in Latin script.
    paragraphs  longest paragraph: full marks up to 150 words, none at 600.
    markdown    share of the marked-up elements that render as meant.
    characters  share of words and characters that can be read: no control and invisible characters, no words of more
                than 30 letters, not all in capitals.
    """

    def judge(_: Prompt, completion: Completion) -> Judgement:
        return _judge(completion.text)

    own = module_source(__file__, markdown.__file__, prose_module.__file__, scripts.__file__)
    return Metric(config.kind, config.weight, version_of(config.kind, own, metadata.version("pyphen").encode()), judge)


def _judge(whole: str) -> Judgement:
    text, note = capped(whole)
    running = prose(text)
    paragraphs = [_sentences(part) for part in _PARAGRAPH_END.split(running)]
    sentences = list(chain.from_iterable(paragraphs))
    words = list(chain.from_iterable(sentences))
    if len(words) < MIN_WORDS:
        return Judgement(None, f"Only {len(words)} words of running text: too few to judge.", (0, len(text)))
    elements, faults = find_markdown_faults(text)
    marks = {
        "sentences": _mark_sentences(len(words) / len(sentences)),
        "words": _mark_words(words, len(sentences)),
        "paragraphs": _falling(max(sum(map(len, part)) for part in paragraphs), *_PARAGRAPH),
        "markdown": 1.0 - min(1.0, len(faults) / elements) if elements else None,
        "characters": _mark_characters(text, words),
    }
    judged = {name: mark for name, mark in marks.items() if mark is not None}
    value = sum(WEIGHTS[name] * mark for name, mark in judged.items()) / sum(WEIGHTS[name] for name in judged)
    shown = ", ".join(f"{name} {mark:.2f}" for name, mark in judged.items())
    reasons = f" Markdown: {'; '.join(faults[:3])}." if faults else ""
    counts = f"{len(words)} words in {len(sentences)} sentences"
    return Judgement(value, f"{counts}: {shown}.{reasons}{note}", (0, len(text)))


def _sentences(paragraph: str) -> list[list[str]]:
    """The words of each sentence that has any."""
    words_of = _WORD.for_text(paragraph).findall
    return [words for part in _SENTENCE_END.split(paragraph) if (words := words_of(part))]


def _mark_sentences(mean_words: float) -> float:
    least, most = _BEST_SENTENCE
    if mean_words < least:
        return mean_words / least
    return _falling(mean_words, most, _WORST_SENTENCE)


def _mark_words(words: Sequence[str], num_sentences: int) -> float | None:
    """Flesch 1948: 206.835 - 1.015 words/sentence - 84.6 syllables/word."""
    latin = [word for word in words if "A" <= word < "\u0250"]
    if len(latin) < MIN_WORDS:
        return None
    syllables = sum(map(_syllables, latin)) / len(latin)
    ease = 206.835 - 1.015 * len(words) / num_sentences - 84.6 * syllables
    return min(1.0, max(0.0, ease / _EASY))


def _mark_characters(text: str, words: Sequence[str]) -> float:
    """Every unreadable per cent costs ten; a text in capitals gets half."""
    unclean = len(_UNCLEAN.findall(text)) / len(text)
    longest = max(map(len, words))
    unreadable = sum(len(word) > _LONG_WORD for word in words) / len(words) if longest > _LONG_WORD else 0.0
    shouting = sum(map(str.isupper, words)) / len(words) if longest > 1 else 0.0
    return max(0.0, 1.0 - 10.0 * (unclean + unreadable)) * (0.5 if shouting > 0.5 else 1.0)


def _falling(value: float, best: float, worst: float) -> float:
    """1 up to `best`, falling linearly to 0 at `worst`."""
    return min(1.0, max(0.0, (worst - value) / (worst - best)))


@lru_cache(maxsize=1)
def _hyphenation() -> Pyphen:
    from pyphen import Pyphen

    return Pyphen(lang="en_US")


@lru_cache(maxsize=50_000)
def _syllables(word: str) -> int:
    """Hyphenation points + 1: an estimate that errs low for short words."""
    hyphenation = _hyphenation()
    points = hyphenation.positions(word[:_LONG_WORD])
    hyphenation.hd.cache.clear()  # where every word would stay for ever
    return len(points) + 1
