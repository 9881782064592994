"""Completions over vLLM servers: spread by load, tried again elsewhere, never from a server with other weights."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from grpo_engine.errors import RolloutUnavailable
from grpo_engine.rollout.vllm.members import Weights
from tests.unit.server_fakes import Pool, jobs, run, until


# ---------------------------------------------------------------- spreading
def test_one_group_is_split_evenly_and_answered_in_order() -> None:
    async def test(pool: Pool) -> None:
        assert await pool.complete(jobs(9)) == list(range(9))
        assert sorted(len(server.served) for server in pool.servers) == [4, 5]

    run(test)


def test_a_group_stays_on_one_server() -> None:
    async def test(pool: Pool) -> None:
        await pool.complete([job for group in range(6) for job in jobs(3, str(group), first=10 * group)])
        groups = [{seed // 10 for seed in server.served} for server in pool.servers]
        assert groups[0].isdisjoint(groups[1])
        assert [len(found) for found in groups] == [3, 3]

    run(test)


def test_the_server_with_fewer_tokens_outstanding_is_next() -> None:
    async def test(pool: Pool) -> None:
        short = [job for index in range(5) for job in jobs(1, str(index), first=index)]
        await pool.complete([*jobs(1, "long", max_tokens=100, first=99), *short])
        assert sorted(map(len, (server.served for server in pool.servers))) == [1, 5]

    run(test)


def test_a_server_never_has_more_rows_than_it_decodes_at_once() -> None:
    async def test(pool: Pool) -> None:
        await pool.complete([job for group in range(10) for job in jobs(3, str(group), first=3 * group)])
        assert [server.most_rows for server in pool.servers] == [3, 3]

    run(test, max_rows=4)


# ---------------------------------------------------------------- several completions a request
def test_a_group_is_one_request_where_there_is_room_for_all() -> None:
    async def test(pool: Pool) -> None:
        asked = [job for group in range(4) for job in jobs(3, str(group), first=10 * group)]
        assert await pool.complete(asked) == [10 * group + index for group in range(4) for index in range(3)]
        assert [server.requests for server in pool.servers] == [[3, 3], [3, 3]]

    run(test, max_rows=6)


def test_where_completions_have_to_wait_each_makes_room_as_soon_as_it_ends() -> None:
    async def test(pool: Pool) -> None:
        assert await pool.complete(jobs(13)) == list(range(13))
        assert {count for server in pool.servers for count in server.requests} == {1}

    run(test, max_rows=6)


def test_a_server_asked_alone_has_its_own_room_and_no_more() -> None:
    async def test(pool: Pool) -> None:
        await pool.dispatcher.complete([*jobs(4), *jobs(4, "1", first=4)], only=pool.list[1])
        assert pool.servers[1].requests == [1] * 8

    run(test, max_rows=6)


@pytest.mark.parametrize(
    ("seed", "both", "second", "runs"),
    [(1, {}, {}, [2]), (7, {}, {}, [1, 1]), (1, {}, {"prompt": [9]}, [1, 1]), (1, {"temperature": 0}, {}, [1, 1])],
)
def test_one_request_asks_for_what_differs_in_nothing_but_the_next_seed_and_is_not_greedy(
    seed: int, both: dict[str, Any], second: dict[str, Any], runs: list[int]
) -> None:
    async def test(pool: Pool) -> None:
        [job] = jobs(1)
        first = {**job.body, **both}
        await pool.complete([replace(job, body=first), replace(job, seed=seed, body={**first, **second})])
        assert pool.servers[0].requests == runs

    run(test, names="a")


# ---------------------------------------------------------------- failures
def test_what_a_dying_server_had_is_answered_by_another() -> None:
    async def test(pool: Pool) -> None:
        first, second = pool.servers
        first.open.clear()
        calling = asyncio.create_task(pool.complete(jobs(8)))
        await until(lambda: first.num_rows == 4)
        first.alive = False
        first.open.set()
        assert await calling == list(range(8))
        assert first.served == []
        assert (pool.dispatcher.num_retried, len(second.served)) == (4, 8)

    run(test)


def test_requests_leave_a_server_whose_health_fails_before_their_time_is_out() -> None:
    async def test(pool: Pool) -> None:
        first = pool.servers[0]
        first.open.clear()  # it will never answer
        calling = asyncio.create_task(pool.complete(jobs(2)))
        await until(lambda: first.num_rows == 1)
        first.alive = False
        assert await calling == [0, 1]

    run(test, request_timeout_s=1000.0)


def test_with_no_server_left_the_faults_of_all_are_told() -> None:
    async def test(pool: Pool) -> None:
        for server in pool.servers:
            server.alive = False
        with pytest.raises(RolloutUnavailable, match=r"no vLLM server is left: a: connection refused; b: connection"):
            await pool.complete(jobs(4))

    run(test, max_attempts=20)


def test_a_completion_is_tried_so_often_and_no_more() -> None:
    async def test(pool: Pool) -> None:
        for server in pool.servers:
            server.finish = "abort"  # each time it is asked
        with pytest.raises(RolloutUnavailable, match=r"failed 2 times, .*: .: somebody .*; .: somebody"):
            await pool.complete(jobs(1))
        assert sorted(len(server.served) for server in pool.servers) == [1, 1]

    run(test, max_attempts=2)


# ---------------------------------------------------------------- weights
def test_a_server_that_comes_back_has_the_present_weights_before_it_gets_work() -> None:
    async def test(pool: Pool) -> None:
        first, second = pool.servers
        first.alive = False
        await until(lambda: not pool.list[0].up)
        await pool.members.update(Weights("/w", "v2", 2))
        first.start_again()
        await until(lambda: pool.list[0].ready)
        await pool.complete(jobs(4))
        assert first.version == "v2"
        assert set(first.salts + second.salts) == {"v2"}
        assert len(first.served) == 2

    run(test)


def test_an_answer_of_a_server_that_was_started_anew_is_not_used() -> None:
    async def test(pool: Pool) -> None:
        first = pool.servers[0]
        first.open.clear()
        calling = asyncio.create_task(pool.complete(jobs(2)))
        await until(lambda: first.num_rows == 1)
        first.version = None  # as if it had been another process all along
        first.open.set()
        assert await calling == [0, 1]
        assert pool.dispatcher.num_retried == 1

    run(test)


def test_an_update_reaches_servers_at_work_and_their_completions_keep_the_version_they_began_with() -> None:
    async def test(pool: Pool) -> None:
        for server in pool.servers:
            server.open.clear()
        calling = asyncio.create_task(pool.dispatcher.complete(jobs(2)))
        await until(lambda: all(server.num_rows for server in pool.servers))
        await pool.members.update(Weights("/w", "v2", 2))
        for server in pool.servers:
            server.open.set()
        assert [version for _, version in await calling] == [1, 1]
        assert [version for _, version in await pool.dispatcher.complete(jobs(2))] == [2, 2]

    run(test)


def test_a_server_that_fails_an_update_gets_no_work_and_the_others_go_on() -> None:
    async def test(pool: Pool) -> None:
        pool.servers[0].alive = False
        await pool.members.update(Weights("/w", "v2", 2))
        assert await pool.complete(jobs(2)) == [0, 1]
        assert pool.servers[1].served == [0, 1]

    run(test)


def test_a_rank_that_shares_a_server_waits_for_the_other_to_update_it() -> None:
    async def test(pool: Pool) -> None:
        pool.list[0].ours_to_update = False
        updating = asyncio.create_task(pool.members.update(Weights("", "v2", 2)))
        await asyncio.sleep(0.02)
        assert not updating.done()
        pool.servers[0].version = "v2"
        await updating
        assert pool.list[0].ready

    run(test, names="a")


def test_looks_at_a_version_are_shared_by_those_who_come_while_one_runs() -> None:
    async def test(pool: Pool) -> None:
        before = pool.list[0].num_checks
        await pool.complete(jobs(50))
        assert 1 <= pool.list[0].num_checks - before < 10

    run(test, names="a")


# ---------------------------------------------------------------- abort, one server alone
def test_abort_gives_back_what_there_is() -> None:
    async def test(pool: Pool) -> None:
        pool.servers[0].open.clear()
        calling = asyncio.create_task(pool.dispatcher.complete(jobs(3)))
        await until(lambda: pool.servers[0].num_rows == 2)
        await pool.dispatcher.abort()
        finishes = [(sampled.finish, len(sampled.token_ids)) for sampled, _ in await calling]
        assert finishes == [("abort", 1), ("abort", 1), ("abort", 0)]

    run(test, names="a", max_rows=2)


def test_one_server_alone_can_be_asked() -> None:
    async def test(pool: Pool) -> None:
        await pool.dispatcher.complete(jobs(6), only=pool.list[1])
        assert len(pool.servers[1].served) == 6

    run(test)


def test_a_start_without_any_answer_names_the_server() -> None:
    async def start() -> None:
        pool = Pool("a")
        pool.servers[0].alive = False
        await pool.members.start()

    with pytest.raises(RolloutUnavailable, match="no answer from vLLM: a: connection refused"):
        asyncio.run(start())
