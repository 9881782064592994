"""Format: one structure of tags, and nothing that only looks like it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_engine.config_rewards import FormatReward
from grpo_engine.reward.format import find_fault, metric
from grpo_engine.types import RewardPart
from tests.reward_cases import cases_of, completion, prompt

WORDS = st.text("ab7é中< \u202e", max_size=12).map(lambda text: f"x{text}")
BLANKS = st.text(" \n\t", max_size=5)


def scored(config: FormatReward, prompt_text: str, text: str) -> RewardPart:
    [part] = metric(config).score([prompt(prompt_text)], [completion(text)])
    return part


@pytest.mark.parametrize("case", cases_of("format"))
def test_the_verdict_and_its_reason(case: dict[str, Any]) -> None:
    config = FormatReward(
        structure=case.get("structure", "think"), allow_empty_thinking=case.get("empty", True), weight=0.5
    )
    part = scored(config, case.get("prompt", "Q"), case["text"])
    assert part.value == case["value"], part.explanation
    assert case.get("fault", "…</think>") in part.explanation
    assert (part.weight, part.span) == (0.5, (0, len(case["text"])))


@settings(max_examples=25)
@given(WORDS, WORDS, BLANKS, BLANKS, BLANKS)
def test_white_space_around_the_blocks_never_matters(thinking: str, answer: str, a: str, b: str, c: str) -> None:
    assert find_fault(f"{a}<think>{thinking}</think>{b}<answer>{answer}</answer>{c}", "think_answer") == ""


@settings(max_examples=25)
@given(st.text(max_size=60))
def test_any_visible_text_after_the_end_tag_is_a_fault(tail: str) -> None:
    faulty = find_fault(f"<think>a</think><answer>5</answer>{tail}", "think_answer")
    assert bool(faulty) == bool(tail.strip())


def test_text_after_the_first_line_does_not_escape_the_format_check() -> None:
    text = "<think>a</think>b\n<think>again</think>c"
    trap = re.compile(r"^<think>.*?</think>.*?$", re.MULTILINE)
    assert trap.match(text), "the pattern that many projects use accepts it"
    assert find_fault(text)


@pytest.mark.parametrize("unit", ["<think>", "</think><think", "<|", "\0", "< / think", "<answer", "\u202e"])
@pytest.mark.timeout(5)
def test_a_megabyte_of_anything_is_judged_at_once(unit: str) -> None:
    text = unit * (1_000_000 // len(unit))
    assert scored(FormatReward(structure="think_answer"), "Q", text).value == 0
    assert scored(FormatReward(), "Q", f"<think>{'x' * 500_000}</think>{'y' * 500_000}").value == 1
