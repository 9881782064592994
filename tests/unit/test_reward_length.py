"""Length: DAPO's soft overlong punishment and cosine shaping, both within [0, 1] and without wrapping."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_engine.config_rewards import LengthReward
from grpo_engine.reward.length import Cosine, cosine_value, metric, overlong_penalty
from grpo_engine.reward.metric import Informed
from grpo_engine.types import RewardPart
from tests.reward_cases import cases_of, completion, prompt

LENGTHS = st.integers(0, 10_000)
LIMITS = st.integers(1, 3_000)


def scored(num_tokens: int, shape: Any, gate: float | None = 1.0) -> RewardPart:
    function = metric(LengthReward(shape=shape, max_tokens=100, buffer_tokens=20, gated_by="accuracy"))
    asked, done = [prompt()], [completion("ab", num_tokens)]
    [part] = function.score_given(asked, done, [gate]) if isinstance(function, Cosine) else function.score(asked, done)
    return part


@pytest.mark.parametrize("case", cases_of("length"))
def test_the_value_of_a_length(case: dict[str, Any]) -> None:
    part = scored(case["num_tokens"], case["shape"], case.get("gate"))
    assert part.value == pytest.approx(case["value"], abs=1e-4)
    assert len(part.explanation) > 10


def test_length_counts_tokens_not_characters_and_says_so() -> None:
    assert scored(90, "overlong").explanation == "90 tokens, 10 over the 80 that are free."
    assert scored(50, "cosine").explanation == "50 of 100 tokens for a right answer, so shorter is better."


def test_only_cosine_shaping_asks_what_the_gating_part_said() -> None:
    overlong, cosine = (metric(LengthReward(shape=s, max_tokens=9, buffer_tokens=2)) for s in ("overlong", "cosine"))
    assert not isinstance(overlong, Informed)
    assert isinstance(cosine, Informed)


def test_without_a_gating_part_every_completion_counts_as_right() -> None:
    [part] = metric(LengthReward(shape="cosine", max_tokens=100, buffer_tokens=20)).score(
        [prompt()], [completion("", 50)]
    )
    assert part.value == pytest.approx(0.75)


@settings(max_examples=25)
@given(LENGTHS, LENGTHS, LIMITS)
def test_among_right_answers_the_longer_never_earns_more(one: int, other: int, limit: int) -> None:
    short, long = sorted((one, other))
    assert cosine_value(short, limit, right=True) >= cosine_value(long, limit, right=True)
    assert overlong_penalty(short, limit, limit) >= overlong_penalty(long, limit, limit)


@settings(max_examples=25)
@given(LENGTHS, LENGTHS, LIMITS)
def test_below_the_limit_no_wrong_answer_earns_as_much_as_a_right_one(one: int, other: int, limit: int) -> None:
    wrong, right = cosine_value(one, limit, right=False), cosine_value(min(other, limit - 1), limit, right=True)
    assert 0 <= wrong < 0.5 < right <= 1
