"""Scoring processes: late and dying ones are replaced, and nothing is lost or mixed up."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_engine.config_rewards import AccuracyReward, GymReward, StepValidityReward
from grpo_engine.errors import RewardError
from grpo_engine.reward import accuracy, gym
from grpo_engine.reward.metric import Judgement, Metric
from grpo_engine.reward.pool import RewardPool
from grpo_engine.types import Completion, Prompt
from tests.ended import is_gone, told_before_its_kill
from tests.reward_cases import completion, prompt
from tests.waiting import wait_until


def never(asked: Prompt, done: Completion) -> Judgement:
    raise AssertionError("it must not be judged in this process")


def metric(limit_s: float = 5.0, unjudged: float | None = None, **given: Any) -> Metric:
    return Metric("fake", 1.0, "fake@1", never, slow=True, time_limit_s=limit_s, unjudged_value=unjudged, given=given)


def judged(pool: RewardPool, texts: list[str], how: Metric | None = None) -> list[Judgement]:
    pairs = [(prompt(f"q{index}"), completion(text)) for index, text in enumerate(texts)]
    return pool.judge(StepValidityReward(), how or metric(), pairs)


def told(text: str, index: int) -> Judgement:
    return Judgement(0.5, f"{text} for q{index}", (0, len(text)))


@pytest.fixture
def pool() -> Iterator[RewardPool]:
    pool = RewardPool(2, "tests.engines.pool_stub")
    yield pool
    pool.close()


def test_many_items_keep_their_order_and_nothing_starts_before_the_first(pool: RewardPool) -> None:
    assert pool.pids == []
    assert judged(pool, []) == []
    assert pool.pids == []
    texts = [f"say {number}\0\u202e\ud800" for number in range(100)]
    assert judged(pool, texts) == [told(text, index) for index, text in enumerate(texts)]
    assert len(pool.pids) == 2
    assert pool.take_counts() == {}


@pytest.mark.parametrize("order", ["spin", "sleep"])
def test_a_late_item_ends_its_process_and_no_other_item(pool: RewardPool, order: str) -> None:
    texts = ["say a", order, *[f"say {number}" for number in range(20)]]
    found = judged(pool, texts, metric(0.3, unjudged=0.0))
    assert found[1] == Judgement(0.0, "Judging it took longer than 0.3 s, so it counts as 0.")
    assert found[:1] + found[2:] == [told(text, index) for index, text in enumerate(texts) if index != 1]
    assert pool.take_counts() == {"reward/late": 1.0, "reward/pool_restarts": 1.0}
    assert judged(pool, ["say again"]) == [told("say again", 0)]


def test_an_item_is_late_by_its_processor_time_long_before_its_wall_clock(
    pool: RewardPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_engine.reward.pool.WALL_FACTOR", 1e6)
    judged(pool, ["spin"], metric(0.1))
    assert pool.take_counts()["reward/late"] == 1.0


def test_the_limit_is_that_of_each_item_and_not_of_what_was_sent_together() -> None:
    with closing(RewardPool(1, "tests.engines.pool_stub")) as pool:
        found = judged(pool, ["work 0.1"] * 16, metric(0.3))
        assert found == [told("work 0.1", index) for index in range(16)]
        assert pool.take_counts() == {}


def test_what_a_late_judge_started_ends_with_it(pool: RewardPool, tmp_path: Path) -> None:
    judged(pool, [f"start {tmp_path / 'pid'}"], metric(0.3))
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: is_gone(pid), 20, "what it started is gone")


def test_sets_have_one_order_in_all_processes(pool: RewardPool) -> None:
    with closing(RewardPool(1, "tests.engines.pool_stub")) as other:
        assert judged(pool, ["hash"]) == judged(other, ["hash"])


def test_a_metric_without_a_value_for_it_abstains(pool: RewardPool) -> None:
    [found] = judged(pool, ["spin"], metric(0.1))
    assert found == Judgement(None, "Judging it took longer than 0.1 s, so it abstains.")


def test_a_process_that_dies_once_loses_nothing(pool: RewardPool, tmp_path: Path) -> None:
    texts = ["say a", f"die_once {tmp_path / 'mark'}", *[f"say {number}" for number in range(40)]]
    assert judged(pool, texts) == [told(text, index) for index, text in enumerate(texts)]
    assert pool.take_counts() == {"reward/pool_restarts": 1.0}


def test_an_item_that_ends_two_processes_is_given_up(pool: RewardPool) -> None:
    found = judged(pool, ["die", "say a", "say b"], metric(unjudged=0.0))
    assert found[0] == Judgement(0.0, "Judging it ended two processes (exit status 3), so it counts as 0.")
    assert found[1:] == [told("say a", 1), told("say b", 2)]


def test_a_process_killed_between_batches_is_replaced(pool: RewardPool) -> None:
    judged(pool, ["say a"])
    for pid in pool.pids:
        os.kill(pid, signal.SIGKILL)
    assert judged(pool, ["say b", "say c"]) == [told("say b", 0), told("say c", 1)]


def test_a_process_that_ended_between_batches_is_held_against_no_item(tmp_path: Path) -> None:
    with closing(RewardPool(1, "tests.engines.pool_stub")) as pool:
        judged(pool, ["say a"])
        [pid] = pool.pids
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: is_gone(pid), 20, "it has ended")
        text = f"die_once {tmp_path / 'mark'}"
        assert judged(pool, [text]) == [told(text, 0)]


@pytest.mark.parametrize(("order", "error"), [("raise oh", "ValueError: oh"), ("memory", "MemoryError")])
def test_a_judge_that_raises_costs_no_process(pool: RewardPool, order: str, error: str) -> None:
    found = judged(pool, [order, "say a"])
    assert found == [Judgement(None, f"The judge failed with {error}, so it abstains."), told("say a", 1)]
    assert pool.take_counts() == {}


def test_children_that_cannot_start_are_an_error() -> None:
    pool = RewardPool(1, "tests.engines.no_such_module")
    with pytest.raises(RewardError, match="end while they start"):
        judged(pool, ["say a"])
    assert (pool.pids, pool.take_counts()) == ([], {"reward/pool_restarts": 3.0})


def test_what_a_metric_loads_is_not_held_against_its_first_completion(pool: RewardPool) -> None:
    assert judged(pool, ["say a"], metric(0.2, load_s=1.0)) == [told("say a", 0)]
    assert judged(pool, ["say b"], metric(0.2, load_s=0.9)) == [told("say b", 0)]
    assert pool.take_counts() == {}


@pytest.mark.parametrize(("given", "message"), [({"refuse": "no task x"}, "no task x"), ({"die": True}, "status 5")])
def test_a_metric_that_cannot_be_made_is_an_error(pool: RewardPool, given: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        judged(pool, ["say a", "say b"], metric(**given))
    assert pool.pids == []
    assert judged(pool, ["say a"]) == [told("say a", 0)]


def test_failed_starts_are_forgotten_when_one_succeeds(pool: RewardPool) -> None:
    for _ in range(2):
        with pytest.raises(RewardError, match="end while they start"):
            judged(pool, ["say a"], metric(die=True))
        assert judged(pool, ["say a"]) == [told("say a", 0)]
        assert pool.take_counts() == {"reward/pool_restarts": 3.0}


def test_closing_ends_the_processes_and_may_be_repeated(pool: RewardPool) -> None:
    judged(pool, ["say a"])
    [pid] = pool.pids
    pool.close()
    pool.close()
    assert not Path(f"/proc/{pid}").exists()


def test_children_die_with_the_process_that_started_them() -> None:
    code = (
        "from tests.integration.test_reward_pool import RewardPool, judged, metric\n"
        "pool = RewardPool(1, 'tests.engines.pool_stub'); judged(pool, ['say a'])\n"
        "print(pool.pids[0], flush=True); judged(pool, ['spin'], metric(600.0))"
    )
    pid = told_before_its_kill(code)
    wait_until(lambda: is_gone(pid), 20, "the child is gone")


def test_formulas_are_judged_in_children_that_know_no_torch() -> None:
    config = AccuracyReward()
    pool, how = RewardPool(1), accuracy.metric(config)
    pairs = [(prompt("Q", answer="x^2+2x+1"), completion(text)) for text in ("(x+1)^2", "(x+2)^2", "9^9^9^9")]
    try:
        assert [said.value for said in pool.judge(config, how, pairs)] == [1.0, 0.0, 0.0]
        assert "torch" not in Path(f"/proc/{pool.pids[0]}/maps").read_text()
    finally:
        pool.close()


def test_a_task_of_the_gym_is_judged_in_children_and_an_answer_that_hangs_its_scorer_abstains() -> None:
    config = GymReward(extract="whole")
    how = replace(gym.metric(config, "countdown", {"min_numbers": 3}), time_limit_s=0.5)
    asked = prompt(answer="3 + 4", metadata={"numbers": [3, 4], "target": 7})
    pairs = [(asked, completion(text)) for text in ("4 + 3", "9**9**9**9**9", "3 * 4", "exec('1')")]
    with closing(RewardPool(1)) as pool:
        assert [said.value for said in pool.judge(config, how, pairs)] == [1.0, None, 0.05, 0.0]
        assert pool.take_counts()["reward/late"] == 1.0
