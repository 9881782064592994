"""The parts of the text metrics that take short ways: each finds what the plain way finds."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_engine.config_rewards import RepetitionReward
from grpo_engine.reward import (
    constraint_checks,
    information_density,
    language_consistency,
    languages,
    readability,
    repetition,
    scripts,
)
from grpo_engine.reward.behaviours import PHRASES
from grpo_engine.reward.density_words import FILLERS, NO_CONTENT
from grpo_engine.reward.phrases import Phrases, find_phrases
from grpo_engine.reward.scripts import WORD_PATTERNS, TextPattern, words_by_script
from tests.reward_cases import completion, prompt

BITS = ["the", "sum", "x", "a.b", "x^2", "3/4", "don't", "it’s", "12", "1,000.5", "+", "==", "<b>", "->", "_", ".",
        ". ", "! ", ", ", "\n", " ", "é", "Zürich", "да", "нет", "然后我们", "へや", "ß", NO_CONTENT, "\x1e", "\u00a0",
        "。", "ab", "ABC", "w" * 45]  # fmt: skip
TEXTS = st.lists(st.sampled_from(BITS), max_size=25).map("".join)
PATTERNS: dict[str, TextPattern] = {
    "density": information_density._WORD, "readability": readability._WORD, "repetition": repetition._UNIT,
    "constraints": constraint_checks._WORD,
}  # fmt: skip


@pytest.mark.parametrize("phrases", [FILLERS, *PHRASES.values()], ids=["fillers", *PHRASES])
@settings(max_examples=60)
@given(data=st.data())
def test_phrases_are_found_by_their_words(phrases: Sequence[str], data: st.DataObject) -> None:
    between = st.sampled_from([" ", ", ", "é", "_", "/", "x", "。", "\n", "’"])
    text = "".join(data.draw(st.lists(st.sampled_from(phrases) | between, max_size=8)))
    assert Phrases(phrases).find(text) == find_phrases(text, phrases)


@pytest.mark.parametrize("kind", PATTERNS)
@settings(max_examples=60)
@given(st.text(alphabet="ab1,.'^/_+= \n!\x1f", max_size=40))
def test_the_form_for_ascii_finds_the_same(kind: str, text: str) -> None:
    pattern = PATTERNS[kind]
    assert pattern.findall(text) == pattern._every.findall(text)


@settings(max_examples=300)
@given(TEXTS)
def test_words_that_blanks_tell_are_those_of_the_patterns(text: str) -> None:
    sentences = information_density._SENTENCE_END.split(text.lower())
    expected = [information_density._WORD._every.findall(sentence) for sentence in sentences]
    assert list(information_density._words_of_sentences(text.lower())) == expected
    units = repetition._UNIT._every.findall(text.casefold())
    assert repetition.split_units(text) == [
        part for unit in units for part in (unit if len(unit) > 40 and unit.isalnum() else (unit,))
    ]


@pytest.mark.parametrize("script", ["Latin", "Cyrillic"])
@settings(max_examples=150)
@given(text=TEXTS)
def test_sentences_of_a_language_have_the_words_of_its_script(script: str, text: str) -> None:
    pattern, lowered = WORD_PATTERNS[script], text.lower()
    sentences = list(language_consistency._sentences(lowered, pattern))
    assert [word for words in sentences for word in words] == [
        word for part in language_consistency._SENTENCE_END.split(lowered) for word in pattern.findall(part)
    ]
    assert all(len(words) >= 4 and sum(map(len, words)) >= 24 for words in sentences[:-1])


@settings(max_examples=200)
@given(TEXTS)
def test_runs_of_a_script_are_found_in_order(text: str) -> None:
    every = re.compile("|".join(f"(?P<{name}>[{ranges}]+)" for name, ranges in scripts._RANGES.items()))
    runs = [(match.lastgroup or "", len(match[0])) for match in every.finditer(text)]
    runs = [(script, letters) for script, letters in runs if letters > 1 or script in scripts.UNSPACED]
    assert list(scripts._runs(text)) == runs
    counts: dict[str, float] = {}
    for script, letters in runs:
        counts[script] = counts.get(script, 0.0) + (letters / 2 if script in scripts.UNSPACED else 1.0)
    assert list(words_by_script(text).items()) == list(counts.items())


@pytest.mark.parametrize("offset", range(0, 120, 7))
@pytest.mark.parametrize(("run", "value"), [(99, 1), (100, 0)])
def test_a_run_of_100_signs_is_found_wherever_it_begins(offset: int, run: int, value: int) -> None:
    words = " ".join(f"w{number}" for number in range(40))
    text = f"{'x' * offset} {'!' * run}\n{words}"
    said = repetition.metric(RepetitionReward()).judge(prompt(), completion(text))
    assert (said.value == 0) is (value == 0)


@settings(max_examples=300)
@given(units=st.lists(st.sampled_from("abc"), max_size=60), n=st.integers(2, 4))
def test_repeats_are_those_of_one_look_after_the_other(units: list[str], n: int) -> None:
    last: dict[tuple[str, ...], int] = {}
    covered: set[int] = set()
    longest = length = distance = 0
    for start in range(len(units) - n + 1):
        gram = tuple(units[start : start + n])
        before = last.get(gram)
        last[gram] = start
        if before is None:
            length = distance = 0
            continue
        covered.update(range(start, start + n))
        length = length + 1 if start - before == distance else start - before + n
        distance = start - before
        if length >= max(4 * distance, 20):
            longest = max(longest, length)
    found = repetition.find_repeats(units, n)
    assert found.share == pytest.approx(len(covered) / max(1, len(units)))
    assert (found.loop[1] - found.loop[0] if found.loop else 0) == longest
    assert found.endless is (length >= max(4 * distance, 20))


def test_a_language_as_probable_as_another_is_the_wanted_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Undecided:
        def classify(self, text: str) -> tuple[str, float]:
            return "as", 0.5

        def rank(self, text: str) -> list[tuple[str, float]]:
            return [("as", 0.5), ("bn", len(text) / 2)]

    monkeypatch.setattr(languages, "_identifier", lambda wanted: Undecided())
    assert languages.language_of("bn", ["a"]) == "bn"
    assert languages.language_of("bn", [""]) == ""


def test_words_are_remembered_in_one_bounded_place() -> None:
    assert readability._syllables("consistency") == 4
    assert readability._hyphenation().hd.cache == {}
