"""Repetition, information density and readability: oracle tables and properties. Language and hostile texts:
tests/integration/test_reward_texts.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_engine.config_rewards import (
    InformationDensityReward,
    ReadabilityReward,
    RepetitionReward,
)
from grpo_engine.reward import information_density, readability, repetition
from grpo_engine.reward.metric import Judgement, Metric
from grpo_engine.reward.prose import prose
from tests.reward_cases import cases_of, check_range, completion, prompt

MAKERS: dict[str, Callable[[], Metric]] = {
    "information_density": lambda: information_density.metric(InformationDensityReward()),
    "readability": lambda: readability.metric(ReadabilityReward()),
    "repetition": lambda: repetition.metric(RepetitionReward()),
}
KINDS = sorted(MAKERS)
SAMPLE = "the sum of 3 and 4 is 7 . so we add x = 2 \n 然后 我们 **so** | -"
WORDS = st.lists(st.sampled_from(SAMPLE.split(" ")), max_size=40)


@cache
def made(kind: str) -> Metric:
    return MAKERS[kind]()


def judged(kind: str, text: str, **columns: Any) -> Judgement:
    return made(kind).judge(prompt(**columns), completion(text))


@pytest.mark.parametrize("case", cases_of("repetition"))
def test_repetition_costs_and_loops_cost_more(case: dict[str, Any]) -> None:
    text = case.get("text", "") + case.get("unit", "") * case.get("times", 1) + case.get("tail", "")
    check_range(case, judged("repetition", text))


@pytest.mark.parametrize("case", cases_of("information_density"))
def test_new_content_counts_and_padding_costs(case: dict[str, Any]) -> None:
    said = judged("information_density", case["text"])
    check_range(case, said)
    if "denser" in case:
        denser = judged("information_density", case["denser"])
        assert denser.value is not None
        assert said.value is not None
        assert denser.value > said.value + 0.05


@pytest.mark.parametrize("case", cases_of("readability"))
def test_what_reads_well(case: dict[str, Any]) -> None:
    check_range(case, judged("readability", case["text"]))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(words=WORDS)
def test_a_value_lies_between_0_and_1_and_white_space_at_the_ends_does_not_matter(kind: str, words: list[str]) -> None:
    text = " ".join(words)
    said = judged(kind, text)
    assert said.value is None or 0 <= said.value <= 1
    assert judged(kind, f"\n {text}  \n").value == pytest.approx(said.value)


@pytest.mark.parametrize("kind", ["information_density", "repetition"])
@settings(max_examples=25)
@given(words=WORDS, copies=st.integers(1, 4))
def test_appending_a_copy_never_raises_the_value(kind: str, words: list[str], copies: int) -> None:
    text = " ".join(words)
    once, more = judged(kind, text), judged(kind, "\n\n".join([text] * (copies + 1)))
    assert once.value is None or (more.value is not None and more.value <= once.value + 1e-9)


def test_letter_case_and_punctuation_do_not_hide_repetition() -> None:
    sentence = "So the train needs three hours for the whole way, and the other needs two. "
    plain, disguised = (sentence * 2, sentence + sentence.upper().replace(",", " --").replace(".", "!!"))
    assert judged("repetition", plain).value == pytest.approx(judged("repetition", disguised).value, abs=0.05)


def test_what_is_not_looked_at_is_said() -> None:
    said = judged("repetition", " ".join(f"w{number}" for number in range(40_000)))
    assert "Only the first 200,000 of" in said.explanation


@pytest.mark.parametrize(
    ("text", "kept"),
    [("a `b` c", "a   c"), ("pay $3 and $4 now", "pay $3 and $4 now"), ("so $x + 1$ is", "so   is"),
     ("a ```b``` c", "a   c"), ("a ```b", "a  "), ("see https://a.b/c d", "see   d"), ("a \\[b\\] c", "a   c"),
     ("a \\begin{align}b\\end{align} c", "a   c"), ("a ` b\n\nc ` d", "a ` b\n\nc ` d"), ("<think>a</think>b", " a b"),
     ("\\frac{a}{b}", " {a}{b}")],
)  # fmt: skip
def test_running_text_is_what_is_neither_code_nor_formula(text: str, kept: str) -> None:
    assert prose(text) == kept


def test_a_version_names_the_metric_and_changes_with_nothing_else() -> None:
    assert [made(kind).version.split("@")[0] for kind in KINDS] == KINDS
    assert repetition.metric(RepetitionReward(weight=3)).version == made("repetition").version
