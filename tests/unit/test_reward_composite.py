"""Building a stage's reward from its config, scoring with all parts, and what the parts tell besides."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any, cast

import pytest
from pydantic import ValidationError

from grpo_engine.config import RLStage
from grpo_engine.errors import RewardError
from grpo_engine.reward.combining import Rule
from grpo_engine.reward.composite import Composite, build_rewards, reward_bounds
from grpo_engine.reward.resources import RewardResources
from grpo_engine.types import Completion, Prompt, RewardFault, RewardPart

NUMBERS = {"kind": "accuracy", "compare": "number"}


def stage(*rewards: dict[str, Any], **changes: Any) -> RLStage:
    return RLStage.model_validate({"data": {"source": "addition"}, "rewards": list(rewards), **changes})


def built(*rewards: dict[str, Any], sources: dict[str, str] | None = None) -> Composite:
    return build_rewards(stage(*rewards), RewardResources(sources or {}))


def completion(text: str, num_tokens: int = 10) -> Completion:
    return Completion([0] * num_tokens, text, "stop", [0.0] * num_tokens, [0.0] * num_tokens)


class Saying:
    """A part that gives every completion the same value."""

    version = "saying@1"

    def __init__(self, name: str, value: float | None) -> None:
        self.name, self.weight, self.value, self.closed = name, 1.0, value, False

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[RewardPart]:
        return [RewardPart(self.name, self.value, self.weight) for _ in completions]

    def take_counts(self) -> dict[str, float]:
        return {"reward/late": 1.0}

    def take_faults(self) -> list[RewardFault]:
        return [RewardFault(self.name, "Oops", "oops")]

    def close(self) -> None:
        self.closed = True


class Told(Saying):
    """One that says what its gate said."""

    def score_given(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], gates: Sequence[float | None]
    ) -> list[RewardPart]:
        return [RewardPart(self.name, gate, self.weight) for gate in gates]


class Stuck(Saying):
    """One that does not close."""

    def close(self) -> None:
        raise OSError("stuck")


def test_parts_keep_the_order_names_and_weights_of_the_config() -> None:
    rewards = built(NUMBERS, {"kind": "format", "weight": 0.2}, NUMBERS | {"extract": "boxed", "weight": -1})
    [parts] = rewards.score([Prompt("p", 0, "2+3=", [1], {"answer": "5"})], [completion("<think>x</think>5")])
    assert [(part.name, part.value, part.weight) for part in parts] == [
        ("accuracy", 1.0, 1.0), ("format", 1.0, 0.2), ("accuracy_2", 0.0, -1.0)
    ]  # fmt: skip
    assert list(rewards.versions) == ["accuracy", "format", "accuracy_2"]


def test_format_gates_accuracy() -> None:
    rules = build_rewards(stage(NUMBERS | {"gated_by": "format"}, {"kind": "format"}), RewardResources()).rules
    assert [(rule.name, rule.gated_by, rule.gate_min) for rule in rules] == [
        ("accuracy", "format", 1.0), ("format", None, 1.0)
    ]  # fmt: skip


def test_a_part_that_asks_its_gate_is_told_of_it_and_not_zeroed_by_it() -> None:
    rules = [Rule("length", gated_by="accuracy"), Rule("accuracy")]
    rewards = Composite([Told("length", 9.0), Saying("accuracy", 0.25)], rules)
    [parts] = rewards.score([Prompt("p", 0, "", [], {})], [completion("")])
    assert [part.value for part in parts] == [0.25, 0.25]
    assert rewards.rules[0].gated_by is None


def test_cosine_length_learns_from_accuracy_what_is_right() -> None:
    cosine = {"kind": "length", "shape": "cosine", "max_tokens": 100, "buffer_tokens": 1, "gated_by": "accuracy"}
    rewards = built(cosine, NUMBERS)
    prompts = [Prompt("p", 0, "2+3=", [1], {"answer": "5"})] * 2
    parts = rewards.score(prompts, [completion("5"), completion("6")])
    assert [row[1].value for row in parts] == [1.0, 0.0]
    assert parts[0][0].value is not None
    assert parts[1][0].value is not None
    assert parts[0][0].value > 0.9 > 0.1 > parts[1][0].value


def test_counts_add_up_faults_are_collected_and_all_is_closed() -> None:
    functions = [Saying("a", 1.0), Saying("b", None)]
    rewards = Composite(functions, [Rule("a"), Rule("b")])
    assert rewards.take_counts() == {"reward/late": 2.0}
    assert [fault.part for fault in rewards.take_faults()] == ["a", "b"]
    rewards.close()
    assert [function.closed for function in functions] == [True, True]


def test_what_parts_share_is_counted_and_a_part_that_does_not_close_keeps_nothing_else_open() -> None:
    shared, first, last = Saying("shared", None), Saying("a", 1.0), Saying("c", 1.0)
    rules = [Rule(name) for name in "abc"]
    rewards = Composite([first, Stuck("b", 1.0), last], rules, None, cast(RewardResources, shared))
    assert rewards.take_counts() == {"reward/late": 4.0}
    with pytest.raises(OSError, match="stuck"):
        rewards.close()
    assert [one.closed for one in (first, last, shared)] == [True, True, True]


def test_parts_that_were_built_are_closed_where_a_later_one_cannot_be() -> None:
    made = Saying("judge", 1.0)
    judge = {"kind": "judge", "base_url": "http://127.0.0.1:9/v1", "model": "m", "rubric": "r"}
    with pytest.raises(RewardError, match="has no source"):
        build_rewards(stage(judge, {"kind": "custom", "name": "mine"}), RewardResources(learned=lambda part: made))
    assert made.closed


def test_a_custom_reward_without_its_source_is_refused() -> None:
    with pytest.raises(RewardError, match="'mine' has no source"):
        built({"kind": "custom", "name": "mine"})


def test_a_model_where_none_can_be_loaded_is_refused() -> None:
    with pytest.raises(RewardError, match="needs a model"):
        built({"kind": "reward_model", "model": "m"})


def test_bounds_follow_weights_signs_clips_and_gates() -> None:
    length = {"kind": "length", "weight": 0.25, "max_tokens": 9, "buffer_tokens": 2}
    assert reward_bounds(stage(NUMBERS, {"kind": "format", "weight": -0.5}, length)) == (-0.5, 1.25)
    assert reward_bounds(stage(NUMBERS | {"clip": (0.2, 0.8)})) == (0.2, 0.8)
    gated = NUMBERS | {"clip": (0.2, 0.8), "gated_by": "format"}
    assert reward_bounds(stage(gated, {"kind": "format", "weight": 0})) == (0.0, 0.8)
    assert reward_bounds(stage(NUMBERS | {"weight": 5}, reward_clip=(-1, 2))) == (0.0, 2.0)


def test_a_users_function_is_taken_to_lie_between_0_and_1_unless_it_is_clipped() -> None:
    mine = {"kind": "custom", "name": "mine", "weight": 2}
    assert reward_bounds(stage(mine)) == (0.0, 2.0)
    assert reward_bounds(stage(mine | {"clip": (-1, 3)})) == (-2.0, 6.0)


def test_rewards_import_neither_torch_nor_the_gym_nor_the_metrics_libraries() -> None:
    code = (
        "import sys, grpo_engine.reward.composite;"
        "print({'torch', 'transformers', 'reasoning_gym', 'sympy', 'py3langid', 'jsonschema'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_answer_accuracy_is_accuracy_by_another_name() -> None:
    one, other = stage(NUMBERS), stage(NUMBERS | {"kind": "answer_accuracy"})
    assert other == one
    assert other.model_dump_json() == one.model_dump_json()  # what hashes are made of
    assert [function.name for function in built(NUMBERS | {"kind": "answer_accuracy"}).functions] == ["accuracy"]
    with pytest.raises(ValidationError, match=r"rewards\.0\.accuracy\.taste"):
        stage({"kind": "answer_accuracy", "taste": 1})
    with pytest.raises(ValidationError, match="kind"):
        stage({"kind": ["answer_accuracy"]})
