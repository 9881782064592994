"""Building a stage's reward, summing it, and the bounds it can reach."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from grpo_engine.config import RLStage
from grpo_engine.errors import RewardError
from grpo_engine.reward.composite import build_rewards, combine, part_names, reward_bounds, score_all
from grpo_engine.types import Completion, Prompt, RewardPart

SOURCE = "def f(completions, **k):\n    return [None if c == '?' else 0.5 for c in completions]"


def stage(*rewards: dict[str, Any]) -> RLStage:
    return RLStage.model_validate({"data": {"source": "addition"}, "rewards": list(rewards)})


def completion(text: str, num_tokens: int = 10) -> Completion:
    return Completion([0] * num_tokens, text, "stop", [0.0] * num_tokens, [0.0] * num_tokens)


def test_parts_keep_the_order_and_weights_of_the_config() -> None:
    config = stage(
        {"kind": "accuracy"}, {"kind": "format", "weight": 0.2}, {"kind": "custom", "name": "mine", "weight": -1}
    )
    [parts] = score_all(
        build_rewards(config, {"mine": SOURCE}),
        [Prompt("p", 0, "2+3=", [1], {"answer": "5"})],
        [completion("<think>x</think>5")],
    )
    assert [(part.name, part.value, part.weight) for part in parts] == [
        ("accuracy", 1.0, 1.0), ("format", 1.0, 0.2), ("mine", 0.5, -1.0)
    ]  # fmt: skip
    assert combine(parts) == pytest.approx(0.7)


def test_a_part_that_abstains_is_left_out_of_the_sum() -> None:
    assert combine([RewardPart("a", None, 5.0), RewardPart("b", 1.0, 0.5)]) == 0.5


def test_the_reward_is_none_when_every_part_abstains() -> None:
    assert combine([RewardPart("a", None, 5.0)]) is None


def test_repeated_names_are_told_apart() -> None:
    config = stage(
        {"kind": "accuracy"}, {"kind": "custom", "name": "accuracy"}, {"kind": "accuracy", "extract": "boxed"}
    )
    assert part_names(config) == ["accuracy", "accuracy_2", "accuracy_3"]
    assert [reward.name for reward in build_rewards(config, {"accuracy": SOURCE})] == part_names(config)


def test_a_custom_reward_without_its_source_is_refused() -> None:
    with pytest.raises(RewardError, match="'mine' has no source"):
        build_rewards(stage({"kind": "custom", "name": "mine"}), {})


def test_bounds_follow_weights_and_signs() -> None:
    config = stage(
        {"kind": "accuracy"},
        {"kind": "format", "weight": -0.5},
        {"kind": "length", "weight": 0.25, "max_tokens": 9, "buffer_tokens": 2},
    )
    assert reward_bounds(config) == (-0.75, 1.0)


def test_rewards_import_neither_torch_nor_the_gym() -> None:
    code = (
        "import sys, grpo_engine.reward.composite; print({'torch', 'transformers', 'reasoning_gym'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
