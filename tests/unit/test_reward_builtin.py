"""The built-in rewards: accuracy, format, length and gym."""

from __future__ import annotations

import re
from typing import Any

import pytest

from grpo_engine.errors import RewardError
from grpo_engine.reward.accuracy import Accuracy, answers_equal
from grpo_engine.reward.format import Format, find_fault
from grpo_engine.reward.gym import Gym
from grpo_engine.reward.length import Length, overlong_penalty
from grpo_engine.types import Completion, Prompt, RewardPart


def prompt(text: str = "347+285=", **columns: Any) -> Prompt:
    return Prompt("p", 0, text, [1, 2], columns)


def completion(text: str, num_tokens: int = 3) -> Completion:
    return Completion([7] * num_tokens, text, "stop", [-0.1] * num_tokens, [-0.1] * num_tokens)


def accuracy_of(text: str, answer: Any) -> RewardPart:
    [part] = Accuracy(1.0, "after_think").score([prompt(answer=answer)], [completion(text)])
    return part


@pytest.mark.parametrize(
    ("answer", "gold"),
    [("632", "632"), (" 632\n", "632"), ("632.0", "632"), ("+632", "632"), ("0632", "632"), ("1,234", "1234"),
     ("\u22125", "-5"), (".5", "0.50"), ("1e3", "1000"), ("x+1", "x+1"), ("5.", "5")],
)  # fmt: skip
def test_equal_answers(answer: str, gold: str) -> None:
    assert answers_equal(answer, gold)


@pytest.mark.parametrize(
    ("answer", "gold"),
    [("633", "632"), ("632.0001", "632"), ("632 apples", "632"), ("1/2", "0.5"), ("Yes", "yes"), ("", "0"),
     ("nan", "NaN"), ("6,32", "632"), ("6 32", "632"), ("0x10", "16"),
     ("12345678901234567891", "12345678901234567890")],
)  # fmt: skip
def test_different_answers(answer: str, gold: str) -> None:
    assert not answers_equal(answer, gold)


def test_a_right_answer_scores_one_and_names_its_span() -> None:
    part = accuracy_of("<think>7+5=12</think>632", "632")
    assert (part.value, part.span) == (1.0, (21, 24))
    assert part.explanation == "632 equals the gold answer 632."


def test_a_wrong_answer_scores_zero_and_shows_both() -> None:
    part = accuracy_of("<think></think>633", 632)
    assert part.value == 0.0
    assert part.explanation == "633 differs from the gold answer 632."


def test_no_answer_scores_zero_with_the_reason() -> None:
    part = accuracy_of("<think>633", "632")
    assert (part.value, part.span) == (0.0, None)
    assert "never closed" in part.explanation


@pytest.mark.parametrize("gold", [None, "", "  ", True, ["632"], {"a": 1}])
def test_accuracy_abstains_without_a_gold_answer(gold: Any) -> None:
    assert accuracy_of("632", gold).value is None


GOOD_FORMATS = ["<think>a</think>b", "<think></think>632", "<think>a\nb\n</think>\n1\n2", " <think>x < y</think> 5 "]
BAD_FORMATS = [
    "632", "", "<think>a</think>", "<think>a</think> \n", "<think>a", "a</think>b", "</think>a<think>b",
    "x<think>a</think>b", "<think>a</think>b</think>", "<think><think>a</think>b", "<think>a</think>b<think>c</think>d",
    "<THINK>a</THINK>b", "<think>a</think>b< /think >", "<think>a</think>632<pad><pad>",
    "<think>a</think>1<|im_start|>2",
    "<think >a</think>b", "<think>a</think>b<thinking>", "<think>a</think>\n<eos>",
]  # fmt: skip


@pytest.mark.parametrize("text", GOOD_FORMATS)
def test_the_exact_format_scores_one(text: str) -> None:
    assert find_fault(text) == ""


@pytest.mark.parametrize("text", BAD_FORMATS)
def test_anything_else_scores_zero_with_a_reason(text: str) -> None:
    [part] = Format(0.1).score([prompt()], [completion(text)])
    assert part.value == 0.0
    assert len(part.explanation) > 10


def test_text_after_the_first_line_does_not_escape_the_format_check() -> None:
    text = "<think>a</think>b\n<think>again</think>c"
    trap = re.compile(r"^<think>.*?</think>.*?$", re.MULTILINE)
    assert trap.match(text), "the pattern that many projects use accepts it"
    assert find_fault(text)


def test_a_prompt_that_opens_thinking_lends_its_tag() -> None:
    parts = Format(0.1).score([prompt("Q <think>\n")] * 2, [completion("a</think>b"), completion("<think>a</think>b")])
    assert [part.value for part in parts] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("num_tokens", "penalty"), [(1, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (101, -1.0), (9999, -1.0)]
)
def test_the_length_penalty_falls_linearly_to_its_floor(num_tokens: int, penalty: float) -> None:
    assert overlong_penalty(num_tokens, 100, 20) == pytest.approx(penalty)


def test_length_counts_tokens_not_characters() -> None:
    [part] = Length(0.1, 100, 20).score([prompt()], [completion("ab", num_tokens=90)])
    assert (part.value, part.weight, part.span) == (-0.5, 0.1, None)
    assert part.explanation == "90 tokens, 10 over the 80 that are free."


def test_gym_scores_with_the_scorer_of_the_task() -> None:
    gym = Gym(1.0, "after_think", "chain_sum", {"min_terms": 2, "max_terms": 2})
    asked = prompt("What is 4 + 3?", question="4 + 3 =", answer="7", metadata={})
    right, wrong, cut = gym.score(
        [asked] * 3, [completion("<think>x</think>7"), completion("8"), completion("<think>")]
    )
    assert right.value == 1.0
    assert wrong.value is not None
    assert wrong.value < 0.1
    assert cut.value == 0.0


def test_a_failing_gym_scorer_abstains_with_its_error() -> None:
    [part] = Gym(1.0, "whole", "countdown").score([prompt(answer="7")], [completion("7")])
    assert part.value is None or part.value < 1
    gym = Gym(1.0, "whole", "x", _scorer=lambda answer, entry: 1 / 0)
    [part] = gym.score([prompt(answer="7")], [completion("7")])
    assert part.value is None
    assert "ZeroDivisionError" in part.explanation


def test_an_unknown_gym_task_is_a_reward_error() -> None:
    with pytest.raises(RewardError, match="no_such_task"):
        Gym(1.0, "whole", "no_such_task").score([prompt(answer="7")], [completion("7")])


def test_versions_are_stable_and_name_the_metric() -> None:
    assert Accuracy(1.0, "boxed").version == Accuracy(2.0, "whole").version
    for part in (Accuracy(1.0, "whole"), Format(1.0), Length(1.0, 2, 1), Gym(1.0, "whole", "chain_sum")):
        assert re.fullmatch(rf"{part.name}@[0-9a-f]{{8}}", part.version)
