"""Completions over vLLM servers: which server gets the next try, what is left when all is done. Needs no vLLM."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from grpo_engine.errors import RolloutUnavailable
from grpo_engine.rollout.vllm.client import ServerLost
from tests.unit.server_fakes import Pool, jobs, run, until
from tests.unit.test_rollout_members import fail


async def hang(started: asyncio.Event, back: asyncio.Event, body: object, count: int, timeout_s: float) -> None:
    """As a connection that never answers and takes its time to close."""
    started.set()
    try:
        await asyncio.Event().wait()
    finally:
        await back.wait()


def test_places_of_a_server_are_used_to_the_last() -> None:
    async def test(pool: Pool) -> None:
        await pool.complete([job for group in range(10) for job in jobs(2, str(group), first=2 * group)])
        assert [server.most_rows for server in pool.servers] == [4, 4]

    run(test, max_rows=4)


def test_a_group_larger_than_a_server_is_sent_in_parts() -> None:
    async def test(pool: Pool) -> None:
        assert await pool.complete(jobs(9)) == list(range(9))
        assert pool.servers[0].most_rows == 3

    run(test, names="a", max_rows=3)


def test_the_only_server_there_is_is_tried_again_when_it_is_back() -> None:
    async def test(pool: Pool) -> None:
        first = pool.servers[0]
        first.finish = "abort"
        calling = asyncio.create_task(pool.complete(jobs(1)))
        await until(lambda: first.served)
        first.finish = "length"
        assert await calling == [0]
        assert first.served == [0, 0]

    run(test, names="a")


def test_a_completion_waits_for_a_server_that_has_not_failed_it_yet() -> None:
    async def test(pool: Pool) -> None:
        first, second = pool.servers
        second.open.clear()
        first.finish = "abort"
        calling = asyncio.create_task(pool.complete([*jobs(1, "0"), *jobs(1, "1", first=1)]))
        await until(lambda: first.served and second.num_rows)
        first.finish = "length"
        await until(lambda: pool.list[0].ready and pool.list[0].num_rows == 0)
        for _ in range(3):
            await pool.members.changed()
        second.open.set()
        assert await calling == [0, 1]
        assert (first.served, sorted(second.served)) == ([0], [0, 1])

    run(test, max_rows=1)


def test_when_all_is_answered_no_server_is_charged_with_anything() -> None:
    async def test(pool: Pool) -> None:
        first = pool.servers[0]
        first.open.clear()
        calling = asyncio.create_task(pool.complete([*jobs(4), *jobs(3, "1", max_tokens=7, first=4)]))
        await until(lambda: first.num_rows)
        charged = [(member.num_rows, member.num_tokens) for member in pool.list]
        first.alive = False
        first.open.set()
        assert await calling == list(range(7))
        assert charged == [(4, 40), (3, 21)]
        assert [(member.num_rows, member.num_tokens) for member in pool.list] == [(0, 0), (0, 0)]

    run(test)


def test_a_server_lost_before_its_work_began_gives_it_to_another() -> None:
    async def test(pool: Pool) -> None:
        calling = asyncio.create_task(pool.complete(jobs(1)))
        await asyncio.sleep(0)  # the server is chosen, nothing is sent
        pool.members.lose(pool.list[0], pool.list[0].gone, "gone")
        assert await calling == [0]
        assert (pool.servers[0].served, pool.servers[1].served) == ([], [0])

    run(test)


def test_where_the_one_server_asked_for_is_lost_the_others_answer() -> None:
    async def test(pool: Pool) -> None:
        pool.servers[1].alive = False
        await until(lambda: not pool.list[1].up)
        answers = await pool.dispatcher.complete(jobs(2), only=pool.list[1])
        assert [sampled.token_ids for sampled, _ in answers] == [[0], [1]]

    run(test)


def test_an_abort_ends_the_calls_that_run_and_none_that_come_later() -> None:
    async def test(pool: Pool) -> None:
        for server in pool.servers:
            server.open.clear()
        pool.servers[0].abort = partial(fail, ServerLost("busy"))  # type: ignore[method-assign]
        calling = asyncio.create_task(pool.dispatcher.complete(jobs(2)))
        await until(lambda: all(server.num_rows for server in pool.servers))
        await pool.dispatcher.abort()
        pool.servers[0].open.set()
        assert [sampled.finish for sampled, _ in await calling] == ["length", "abort"]
        pool.servers[1].finish = "length"
        assert await pool.complete(jobs(2)) == [0, 1]

    run(test)


def test_an_abort_answers_every_completion_of_a_request_that_was_to_be_tried_again() -> None:
    async def test(pool: Pool) -> None:
        first = pool.servers[0]
        first.open.clear()
        calling = asyncio.create_task(pool.dispatcher.complete(jobs(3)))
        await until(lambda: first.num_rows == 3)
        first.alive = False
        await until(lambda: not pool.list[0].up)
        await pool.dispatcher.abort()
        first.start_again()
        assert [(sampled.finish, sampled.token_ids) for sampled, _ in await calling] == [("abort", [])] * 3

    run(test, names="a")


def test_no_hope_for_any_server_ends_a_call_at_once() -> None:
    async def test(pool: Pool) -> None:
        for member in pool.list:
            pool.members.lose(member, member.gone, "gone")
            member.hope_ends_s = 0.0
        with pytest.raises(RolloutUnavailable, match="no vLLM server is left: a: gone; b: gone"):
            await pool.complete(jobs(1))

    run(test)


def test_a_try_of_an_earlier_life_that_ends_late_does_not_end_the_next() -> None:
    async def test(pool: Pool) -> None:
        first, member = pool.servers[0], pool.list[0]
        started, back, usual = asyncio.Event(), asyncio.Event(), first.complete
        first.complete = partial(hang, started, back)  # type: ignore[method-assign,assignment]
        calling = asyncio.create_task(pool.dispatcher.complete(jobs(1), only=member))
        await started.wait()
        first.complete, first.alive = usual, False  # type: ignore[method-assign]
        await until(lambda: not member.up)
        first.start_again()
        await until(lambda: member.ready)
        life = member.gone
        back.set()
        await calling
        assert not life.is_set()

    run(test)
