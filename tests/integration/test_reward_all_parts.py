"""All rule-based parts together, built from a config as a run builds them, over good and hostile completions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from grpo_engine.config import RLStage
from grpo_engine.errors import RewardError
from grpo_engine.reward.composite import Composite, build_rewards, reward_bounds
from grpo_engine.reward.resources import RewardResources
from grpo_engine.types import Completion, Group, Prompt, Rollout

PARTS: list[dict[str, Any]] = [
    {"kind": "accuracy", "gated_by": "format"}, {"kind": "format"}, {"kind": "step_validity"},
    {"kind": "logical_consistency"}, {"kind": "language_consistency"}, {"kind": "readability"},
    {"kind": "information_density"}, {"kind": "repetition"}, {"kind": "instruction_following"},
    {"kind": "code_quality"}, {"kind": "length", "max_tokens": 400, "buffer_tokens": 100},
    {"kind": "length", "shape": "cosine", "gated_by": "accuracy", "max_tokens": 400, "buffer_tokens": 100},
]  # fmt: skip
STAGE = RLStage.model_validate({"data": {"source": "addition"}, "rewards": PARTS})
PROMPT = Prompt("p", 0, "What is 12 * 7?", [1], {"answer": "84"})
GOOD = "<think>12*7=84, and let me check: 84/7=12.</think>The answer is \\boxed{84}."
HOSTILE = {
    "empty": "", "nothing but blanks": " \n\t", "NUL bytes": "\0" * 5000, "right-to-left": "\u202e48\u202c" * 2000,
    "a tower of powers": "<think></think>\\boxed{9^9^9^9}", "open braces": "\\boxed{" * 20_000,
    "a gigantic number": "<think>1=1</think>" + "9" * 200_000, "one megabyte": "la " * 350_000,
    "look-alikes": "<think>x</think>８４", "lone surrogate": "<think>x</think>\ud800",
}  # fmt: skip


@pytest.fixture(scope="module")
def rewards() -> Iterator[Composite]:
    with closing(build_rewards(STAGE, RewardResources(num_processes=1))) as built:
        yield built


def scored(rewards: Composite, *texts: str) -> list[Rollout]:
    completions = [Completion([0] * min(len(text), 500), text, "stop", [], []) for text in texts]
    parts = rewards.score([PROMPT] * len(texts), completions)
    [group] = rewards.combine(
        [Group("1-0", PROMPT, [Rollout(c, p, None) for c, p in zip(completions, parts, strict=True)])]
    )
    return group.rollouts


def test_a_good_completion_earns_more_than_a_wrong_one(rewards: Composite) -> None:
    good, wrong = scored(rewards, GOOD, GOOD.replace("84}", "85}"))
    assert good.reward is not None
    assert wrong.reward is not None
    assert good.reward > wrong.reward + 0.9
    assert all(part.explanation for part in good.parts)
    assert {part.name: part.value for part in good.parts}["step_validity"] == 1.0


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_no_part_breaks_or_leaves_its_range_on_hostile_text(text: str, rewards: Composite) -> None:
    [rollout] = scored(rewards, text)
    lowest, highest = reward_bounds(STAGE)
    assert all(part.value is None or 0 <= part.value <= 1 for part in rollout.parts)
    assert rollout.reward is None or lowest <= rollout.reward <= highest
    assert {part.name: part.counted for part in rollout.parts}["accuracy"] in (0.0, None)


def test_a_stage_of_the_gym_is_scored_by_its_tasks_own_scorer_under_its_options() -> None:
    data = {"source": "reasoning_gym", "task": "countdown", "options": {"min_numbers": 3, "max_numbers": 3}}
    stage = RLStage.model_validate({"data": data, "rewards": [{"kind": "gym"}, {"kind": "gym", "extract": "boxed"}]})
    asked = Prompt("p", 0, "Q", [1], {"answer": "1 + 2", "metadata": {"numbers": [1, 2], "target": 3}})
    with closing(build_rewards(stage, RewardResources(num_processes=1))) as rewards:
        [parts] = rewards.score([asked], [Completion([0], "2 + 1", "stop", [], [])])
        assert [(part.name, part.value) for part in parts] == [("gym", 1.0), ("gym_2", 0.0)]
        assert all(function.version.startswith("gym@") for function in rewards.functions)
    unknown = stage.model_copy(update={"data": stage.data.model_copy(update={"task": "no_such_task"})})
    refused = pytest.raises(RewardError, match="no_such_task")
    with closing(build_rewards(unknown, RewardResources(num_processes=1))) as rewards, refused:
        rewards.score([asked], [Completion([0], "2 + 1", "stop", [], [])])
