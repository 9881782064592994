"""Language consistency: the share of the words that are in the wanted language, code and mathematics left out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata

from grpo_engine.config_rewards import LanguageConsistencyReward
from grpo_engine.reward import languages, scripts
from grpo_engine.reward import prose as prose_module
from grpo_engine.reward.languages import CANDIDATES, SCRIPTS_OF, language_of, settled_by_function_words
from grpo_engine.reward.metric import Judgement, Metric
from grpo_engine.reward.prose import capped, prose
from grpo_engine.reward.scripts import WORD_PATTERNS, words_by_script
from grpo_engine.reward.versions import module_source, version_of
from grpo_engine.types import Completion, Prompt

MIN_WORDS = 5
"""Below this many words the metric abstains."""
# What py3langid needs to say anything; shorter sentences are joined with the next.
_MIN_LETTERS, _MIN_SENTENCE_WORDS = 24, 4
# Of ASCII text in small letters, letters and ends of lines as they are, a blank for anything else.
_LETTERS_ONLY = bytes(code if chr(code) in "abcdefghijklmnopqrstuvwxyz\n" else ord(" ") for code in range(256))
_SENTENCE_END = re.compile(r"[.!?;:\n。！？；](?:(?<=[\n。！？；])|(?=\s))\s*")


def metric(config: LanguageConsistencyReward) -> Metric:
    """Scripts decide first, then the function words of a sentence, and py3langid where those settle nothing.

    A prompt's column `language` goes before the config's language. Sentences that py3langid cannot place are left out.
    """

    def judge(prompt: Prompt, completion: Completion) -> Judgement:
        wanted = prompt.columns.get("language") or config.language
        if (problem := language_problem(wanted)) is not None:
            return Judgement(None, problem)
        text, note = capped(completion.text)
        return _judge(wanted, prose(text), (0, len(text)), note)

    return Metric(config.kind, config.weight, version(), judge)


def version() -> str:
    own = module_source(__file__, languages.__file__, scripts.__file__, prose_module.__file__)
    return version_of("language_consistency", own, metadata.version("py3langid").encode())


def language_problem(language: object) -> str | None:
    """Why `language` cannot be judged, as a sentence; None when it can. Loads no model."""
    if isinstance(language, str) and language in SCRIPTS_OF:
        return None
    return f"The language {str(language)[:40]!r} is not among those that can be told apart; use an ISO 639-1 code."


def _judge(wanted: str, text: str, span: tuple[int, int], note: str) -> Judgement:
    words = words_by_language(wanted, text)
    unclear = words.pop("", 0.0)
    total = sum(words.values())
    if total < MIN_WORDS:
        more = f" and {unclear:.0f} of unclear language" if unclear else ""
        return Judgement(None, f"Only {total:.0f} words outside code and mathematics{more}: too few to judge.", span)
    value = words.pop(wanted, 0.0) / total
    most = max(words, key=words.__getitem__, default=None)
    other = f"; the most frequent other: {most}, {words[most]:.0f} words" if most is not None else ""
    return Judgement(value, f"{value:.0%} of {total:.0f} words are in {wanted!r}{other}.{note}", span)


def words_by_language(wanted: str, text: str) -> dict[str, float]:
    """Words by language code, by script where that is already wrong, under "" where the language is unclear."""
    own = SCRIPTS_OF[wanted]
    if own == ("Latin",) and text.isascii():
        return _told_apart(wanted, text)
    by_script = words_by_script(text)
    foreign = {name: count for name, count in by_script.items() if name not in (*own, "Greek")}  # letters of formulas
    if own[0] in CANDIDATES:
        return foreign | _told_apart(wanted, text)
    if "Han" in own and "Hangul" not in own:
        return {name: count for name, count in foreign.items() if name != "Kana"} | _chinese_or_japanese(text)
    return foreign | {wanted: sum(by_script.get(name, 0.0) for name in own)}


def _told_apart(wanted: str, text: str) -> dict[str, float]:
    """Words of the wanted language's script by language, sentence by sentence."""
    counts: dict[str, float] = {}
    pattern = WORD_PATTERNS[SCRIPTS_OF[wanted][0]]
    for words in _sentences(text.lower(), pattern):
        found = wanted if settled_by_function_words(wanted, words) else language_of(wanted, words)
        counts[found] = counts.get(found, 0.0) + len(words)
    return counts


def _chinese_or_japanese(text: str) -> dict[str, float]:
    """Sentences with kana are Japanese, those in Han alone Chinese."""
    counts: dict[str, float] = {}
    for sentence in _SENTENCE_END.split(text):
        words = words_by_script(sentence)
        found = "ja" if "Kana" in words else "zh"
        counts[found] = counts.get(found, 0.0) + words.get("Kana", 0.0) + words.get("Han", 0.0)
    return counts


def _sentences(text: str, pattern: re.Pattern[str]) -> Iterator[list[str]]:
    """The words of each sentence; a short sentence is joined with what follows.

    In ASCII there are but Latin words, which the blanks around them tell faster than the pattern does.
    """
    sentences = _SENTENCE_END.split(text)
    all_spaced = "\n".join(sentences).encode("ascii", "replace").translate(_LETTERS_ONLY).decode().split("\n")
    is_latin = pattern is WORD_PATTERNS["Latin"]
    words: list[str] = []
    for sentence, spaced in zip(sentences, all_spaced, strict=True):
        if is_latin and sentence.isascii():
            words += [word for word in spaced.split() if len(word) > 1]
        else:
            words += pattern.findall(sentence)
        if len(words) >= _MIN_SENTENCE_WORDS and len("".join(words)) >= _MIN_LETTERS:
            yield words
            words = []
    if words:
        yield words
