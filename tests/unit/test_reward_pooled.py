"""A slow metric as a reward function: its quick judge first, the pool for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from grpo_engine.config_rewards import AccuracyReward, Part
from grpo_engine.reward.metric import Judgement, Metric
from grpo_engine.reward.pool import Pair, Pooled, RewardPool
from grpo_engine.types import Completion, Prompt
from tests.reward_cases import completion, prompt


class FakePool:
    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def judge(self, config: Part, metric: Metric, pairs: Sequence[Pair]) -> list[Judgement]:
        self.asked.append([done.text for _, done in pairs])
        return [Judgement(0.5, f"pool: {done.text}") for _, done in pairs]


def quick(asked: Prompt, done: Completion) -> Judgement | None:
    return Judgement(1.0, f"quick: {done.text}") if done.text.isdigit() else None


def never(asked: Prompt, done: Completion) -> Judgement:
    raise AssertionError("it must not be judged in this process")


def scored(pool: FakePool, texts: Sequence[str], *, is_quick: bool = True) -> list[tuple[str, float | None]]:
    metric = Metric("accuracy", 2.0, "accuracy@1", never, slow=True, quick=quick if is_quick else None)
    pooled = Pooled(metric, AccuracyReward(), cast(RewardPool, pool))
    parts = pooled.score([prompt()] * len(texts), [completion(text) for text in texts])
    assert {(part.name, part.weight, part.version) for part in parts} == {("accuracy", 2.0, "accuracy@1")}
    return [(part.explanation, part.value) for part in parts]


def test_only_what_the_quick_judge_leaves_open_goes_to_the_pool_and_the_order_stays() -> None:
    pool = FakePool()
    found = scored(pool, ["x", "1", "y", "2"])
    assert found == [("pool: x", 0.5), ("quick: 1", 1.0), ("pool: y", 0.5), ("quick: 2", 1.0)]
    assert pool.asked == [["x", "y"]]


def test_without_open_items_the_pool_is_not_asked() -> None:
    pool = FakePool()
    scored(pool, ["1", "2"])
    assert pool.asked == []


def test_without_a_quick_judge_everything_goes_to_the_pool() -> None:
    pool = FakePool()
    scored(pool, ["1", "x"], is_quick=False)
    assert pool.asked == [["1", "x"]]
