"""How a judge is asked: waits, limits and costs, and when it is given up; what its cache knows of others."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from grpo_engine.config_rewards import JudgeReward
from grpo_engine.reward.learned import judge_client
from grpo_engine.reward.learned.judge import Judge
from grpo_engine.reward.learned.judge_cache import JudgeCache
from grpo_engine.reward.learned.judge_messages import Verdict
from grpo_engine.types import Prompt, RewardPart
from tests.judge_stub import Asked, JudgeStub, Reply, judge_stub, scored
from tests.reward_cases import completion


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_client, "FIRST_WAIT_S", 0.001)


def judge(stub: JudgeStub, cache: JudgeCache | None = None, share: int = 1, **changes: Any) -> Judge:
    config = JudgeReward.model_validate({"base_url": stub.url, "model": "m", "rubric": "Grade it.", **changes})
    return Judge(config, cache, share=share, environment={})


def judged(reward: Judge, *texts: str, gold: Any = "4") -> list[RewardPart]:
    asked = Prompt("p", 0, "2+2?", [1], {"prompt": "2+2?", "answer": gold})
    return reward.score([asked] * len(texts), [completion(text) for text in texts])


# ---------------------------------------------------------------- giving up
def test_failures_that_do_not_follow_each_other_are_no_outage() -> None:
    with judge_stub(lambda number, asked: scored(5) if number % 4 == 3 else (404, b"lost")) as stub:
        judged(judge(stub, max_concurrent=1), *map(str, range(20)))
    assert len(stub.asked) == 20


def test_an_outage_is_over_with_its_batch() -> None:
    with judge_stub(lambda number, asked: (404, b"down") if number < 4 else scored(5)) as stub:
        reward = judge(stub, max_concurrent=1)
        assert {part.value for part in judged(reward, *map(str, range(9)))} == {None}
        assert {part.value for part in judged(reward, *map(str, range(9)))} == {0.5}


def test_one_try_takes_no_more_than_half_of_the_time_and_tells_less_than_what_failed_before() -> None:
    release = threading.Event()

    def answer(number: int, asked: Asked) -> Reply:
        if number == 0:
            release.wait(20)
        return scored(10)

    with judge_stub(answer) as stub:
        [part] = judged(judge(stub, time_limit_s=3.0), "4")
        release.set()
    assert (part.value, len(stub.asked)) == (1.0, 2)


def test_a_judge_that_failed_and_then_hung_is_told_by_its_failure() -> None:
    release = threading.Event()

    def answer(number: int, asked: Asked) -> Reply:
        if number:
            release.wait(20)
        return 503, b"busy"

    with judge_stub(answer) as stub:
        [part] = judged(judge(stub, time_limit_s=0.5), "4")
        release.set()
    assert part.value is None
    assert "the last: status 503 busy" in part.explanation


@pytest.mark.parametrize("status", [408, 409])
def test_a_conflict_and_a_timeout_of_the_endpoint_are_tried_again(status: int) -> None:
    with judge_stub(lambda number, asked: scored(10) if number else (status, b"again")) as stub:
        assert [part.value for part in judged(judge(stub), "4")] == [1.0]


def test_waits_double_up_to_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    longest: list[float] = []

    def drawn(low: float, high: float) -> float:
        longest.append(high)
        return low

    monkeypatch.setattr(judge_client, "LONGEST_WAIT_S", 0.003)
    with judge_stub(lambda number, asked: scored(10) if number == 4 else (500, b"")) as stub:
        reward = judge(stub)
        monkeypatch.setattr(reward._client._random, "uniform", drawn)
        judged(reward, "4")
    assert longest == [0.001, 0.002, 0.003, 0.003]


def test_a_reply_beyond_the_limit_is_not_read_to_its_end() -> None:
    with judge_stub(lambda number, asked: (200, b"x" * (2 << 20))) as stub:
        [part] = judged(judge(stub), "4")
    assert "its reply is longer than 1048576 bytes" in part.explanation


# ---------------------------------------------------------------- limits and costs
def test_a_rank_may_ask_its_share_rounded_up() -> None:
    with judge_stub(lambda number, asked: scored(5)) as stub:
        parts = judged(judge(stub, share=2, max_concurrent=1, max_requests=3), "1", "2", "3")
    assert [part.value for part in parts] == [0.5, 0.5, None]


@pytest.mark.parametrize("told", [True, -1, "9", None, 1.5])
def test_tokens_that_are_no_count_are_guessed_from_the_characters(told: Any) -> None:
    said = {"message": {"content": '{"score": 5, "reason": "x"}'}}
    with judge_stub(lambda number, asked: (200, {"choices": [said], "usage": {"prompt_tokens": told}})) as stub:
        reward = judge(stub, price_per_million_prompt_tokens=1e6)
        judged(reward, "4")
    sent = sum(len(turn["content"]) for turn in stub.asked[0].body["messages"])
    assert reward.take_counts()["reward/judge_cost"] == pytest.approx(sent / 3, abs=1)


def test_what_earlier_attempts_cost_counts_and_what_another_judge_cost_does_not(tmp_path: Path) -> None:
    lines = [{"judge": name, "key": name, "value": 1, "reason": "", "requests": 2, "cost": 3.0} for name in "aab"]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, lines)))
    cache = JudgeCache("a", None, [tmp_path])
    assert (cache.num_requests, cache.cost, cache.get("b")) == (4, 6.0, Verdict(1.0, ""))
    with judge_stub(lambda number, asked: scored(5)) as stub:
        values = [judged(judge(stub, cache, max_cost=limit), "1")[0].value for limit in (6.0, 6.5)]
    assert values == [None, 0.5]


def test_an_answer_is_on_disk_as_soon_as_it_is_there(tmp_path: Path) -> None:
    cache = JudgeCache("a", tmp_path / "own.jsonl")
    cache.put("key", Verdict(0.5, "so"), 1, 0.0)
    assert json.loads((tmp_path / "own.jsonl").read_text())["key"] == "key"
    cache.close()


# ---------------------------------------------------------------- what is asked
@pytest.mark.parametrize("gold", [" \n", 4, None])
def test_a_gold_answer_that_is_no_text_is_not_quoted(gold: Any) -> None:
    with judge_stub(lambda number, asked: scored(5)) as stub:
        judged(judge(stub), "4", gold=gold)
    assert set(json.loads(stub.asked[0].body["messages"][1]["content"])) == {"question", "answer"}


def test_another_model_rubric_or_extraction_is_another_version() -> None:
    changes: list[dict[str, Any]] = [{}, {"model": "n"}, {"rubric": "Be strict."}, {"extract": "boxed"}]
    with judge_stub(lambda number, asked: scored(5)) as stub:
        assert len({judge(stub, **change).version for change in changes}) == 4
