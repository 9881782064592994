"""Which language a text is in, by a model that takes its time to load, and hostile texts before all text metrics."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_engine.config_rewards import (
    InformationDensityReward,
    InstructionFollowingReward,
    LanguageConsistencyReward,
    ReadabilityReward,
    RepetitionReward,
)
from grpo_engine.reward import (
    information_density,
    instruction_following,
    language_consistency,
    languages,
    readability,
    repetition,
)
from grpo_engine.reward.behaviours import BEHAVIOURS, count_behaviours
from grpo_engine.reward.metric import Judgement, Metric
from grpo_engine.reward.prose import MAX_CHARACTERS
from tests.reward_cases import cases_of, check_range, completion, prompt

MAKERS: dict[str, Callable[[], Metric]] = {
    "information_density": lambda: information_density.metric(InformationDensityReward()),
    "instruction_following": lambda: instruction_following.metric(InstructionFollowingReward(extract="whole")),
    "language_consistency": lambda: language_consistency.metric(LanguageConsistencyReward()),
    "readability": lambda: readability.metric(ReadabilityReward()),
    "repetition": lambda: repetition.metric(RepetitionReward()),
}
CONSTRAINTS = [case.values[0]["constraint"] for case in cases_of("instruction_following")]
CONSTRAINTS += [{"kind": "language", "language": "fr"}]
HOSTILE = ["a ", "a", "\0", "\u202e", "$", "`", "``` ", "```\n", "\\[", "<a ", " ", "\n", "\n \n", "| - ", "](", "**a ",
           "#", "!", ". ", ".", "中", "中a ", "і", "9^", "\\begin{a}", "1. ", "- ", "[", '{"a":', "[1,", "'", "wait ",
           "let me ", "я z ", "ab. CD! "]  # fmt: skip
SAMPLE = "the sum of 3 and 4 is 7 . so we add x = 2 \n 然后 我们 **so** | -"
WORDS = st.lists(st.sampled_from(SAMPLE.split(" ")), max_size=40)


@cache
def made(kind: str) -> Metric:
    return MAKERS[kind]()


def judged(kind: str, text: str) -> Judgement:
    return made(kind).judge(prompt(constraints=CONSTRAINTS), completion(text))


@pytest.mark.parametrize("case", cases_of("language_consistency"))
def test_the_share_of_the_wanted_language(case: dict[str, Any]) -> None:
    metric = language_consistency.metric(LanguageConsistencyReward(language=case.get("language", "en")))
    columns = {"language": case["column"]} if "column" in case else {}
    check_range(case, metric.judge(prompt(**columns), completion(case["text"])))


@settings(max_examples=40)
@given(words=WORDS)
def test_a_share_lies_between_0_and_1_and_white_space_at_the_ends_does_not_matter(words: list[str]) -> None:
    text = " ".join(words)
    said = judged("language_consistency", text)
    assert said.value is None or 0 <= said.value <= 1
    assert judged("language_consistency", f"\n {text}  \n").value == said.value


@settings(max_examples=20)
@given(number=st.integers(0, 6))
def test_more_sentences_in_another_language_never_raise_the_share(number: int) -> None:
    english = "First we find the total number of apples in the five boxes of the shop.\n"
    german = "Also ist die Antwort sechzig, denn in jeder Kiste sind zwölf Äpfel.\n"
    fewer, more = (judged("language_consistency", english * 3 + german * n).value for n in (number, number + 1))
    assert fewer is not None
    assert more is not None
    assert more < fewer


def test_every_language_that_is_told_apart_is_known_to_the_model() -> None:
    known = set(languages._model().labels)
    assert {code for codes in languages.CANDIDATES.values() for code in codes} <= known
    assert set(languages.SCRIPTS_OF) <= known


@pytest.mark.parametrize("kind", sorted(MAKERS))
@pytest.mark.parametrize("unit", HOSTILE)
def test_a_megabyte_of_anything_is_judged_in_seconds_and_capped(kind: str, unit: str) -> None:
    began = time.process_time()
    said = judged(kind, unit * (1_000_000 // len(unit)) + "x")
    assert time.process_time() - began < 5
    assert said.value is None or 0 <= said.value <= 1
    assert len(said.explanation) < 3_000
    assert kind == "instruction_following" or (said.span is not None and said.span[1] <= MAX_CHARACTERS)


@pytest.mark.parametrize("unit", HOSTILE)
def test_behaviours_of_a_megabyte_are_counted_in_seconds(unit: str) -> None:
    began = time.process_time()
    counts = count_behaviours(unit * (1_000_000 // len(unit)))
    assert time.process_time() - began < 5
    assert tuple(counts) == BEHAVIOURS
