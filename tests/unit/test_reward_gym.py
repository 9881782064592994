"""The gym reward: the scorer that reasoning-gym ships with a task."""

from __future__ import annotations

import re
from typing import Any

import pytest

from grpo_engine.errors import RewardError
from grpo_engine.reward.gym import Gym
from grpo_engine.types import Completion, Prompt


def prompt(text: str = "347+285=", **columns: Any) -> Prompt:
    return Prompt("p", 0, text, [1, 2], columns)


def completion(text: str) -> Completion:
    return Completion([7, 7, 7], text, "stop", [-0.1] * 3, [-0.1] * 3)


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


def test_the_version_names_the_metric() -> None:
    assert re.fullmatch("gym@[0-9a-f]{8}", Gym(1.0, "whole", "chain_sum").version)
