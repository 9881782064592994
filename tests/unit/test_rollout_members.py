"""What a pool of vLLM servers remembers of each: lives, weights, hope. Needs no vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from grpo_engine.errors import RolloutUnavailable
from grpo_engine.rollout.vllm.client import ServerLost, UpdateFailed
from grpo_engine.rollout.vllm.members import Members, Weights
from tests.unit.server_fakes import FakeServer, Pool, run, until

LONG_S = 60.0
"""Longer than any test may take."""


class FakeProcess:
    """A server process of our own: `status` is None while it runs."""

    def __init__(self, status: int | None = None, *, may_start_again: bool = True) -> None:
        self.status, self.may_start_again, self.killed = status, may_start_again, False

    def poll(self) -> int | None:
        return self.status

    def describe_end(self) -> str:
        return f"it ended with status {self.status}"

    def kill(self) -> None:
        self.killed = True


def own(pool: Pool, place: int, process: FakeProcess) -> None:
    pool.list[place].process = process  # type: ignore[assignment]


def patient(pool: Pool, *, patience_s: float, start_timeout_s: float) -> Members:
    """The pool's servers, with so long to come back or to start."""
    return Members(pool.list, health_interval_s=0.01, patience_s=patience_s, start_timeout_s=start_timeout_s)


async def answer(value: Any) -> Any:
    return value


async def fail(error: Exception, *_: object) -> None:
    raise error


async def held_until(gate: asyncio.Event, server: FakeServer, seen: list[str | None]) -> str | None:
    """The version that the server held when it was asked."""
    seen.append(server.version)
    held = server.version
    await gate.wait()
    return held


def run_unwatched(test: Callable[[Pool], Awaitable[None]], names: str = "ab") -> None:
    """Run the test on a pool that nobody started or watches."""

    async def main() -> None:
        async with asyncio.timeout(5):
            await test(Pool(names))

    asyncio.run(main())


# ---------------------------------------------------------------- start
def test_the_shortest_context_that_a_server_tells_counts() -> None:
    async def test(pool: Pool) -> None:
        for server, length in zip(pool.servers, (64, 40, None), strict=True):
            server.max_model_len = partial(answer, length)  # type: ignore[method-assign]
        assert await pool.members.start() == 40

    run_unwatched(test, "abc")


def test_one_server_of_others_is_enough_to_start_and_every_one_of_our_own_is_needed() -> None:
    async def test(pool: Pool) -> None:
        pool.servers[0].alive = False
        await pool.members.start()
        assert [member.up for member in pool.list] == [False, True]
        own(pool, 0, FakeProcess(1))
        with pytest.raises(RolloutUnavailable, match=r"no answer from vLLM: a: it ended with status 1$"):
            await pool.members.start()

    run_unwatched(test)


@pytest.mark.parametrize(("process", "patience_s"), [(None, LONG_S), (FakeProcess(), 0.0)])
def test_a_server_of_our_own_may_take_its_time_to_start_and_one_of_others_ours(
    process: FakeProcess | None, patience_s: float
) -> None:
    async def test(pool: Pool) -> None:
        looks = iter([False, False, True])
        pool.servers[0].check_health = lambda: answer(None) if next(looks) else fail(ServerLost("no"))  # type: ignore[method-assign]
        if process is not None:
            own(pool, 0, process)
        members = patient(pool, patience_s=patience_s, start_timeout_s=LONG_S - patience_s)
        await members._await_start(pool.list[0])
        assert pool.list[0].up

    run_unwatched(test, "a")


def test_a_server_that_has_no_weights_yet_gets_no_work_and_is_not_lost_for_it() -> None:
    async def test(pool: Pool) -> None:
        await pool.members.start()
        watch = asyncio.create_task(pool.members.watch())
        for _ in range(3):
            await pool.members.changed()
        watch.cancel()
        assert (pool.members.ready, pool.list[0].up, pool.list[0].gone.is_set()) == ([], True, False)

    run_unwatched(test)


# ---------------------------------------------------------------- weights
def test_a_server_that_does_not_take_the_weights_leaves_the_others_at_work() -> None:
    async def test(pool: Pool) -> None:
        pool.servers[0].load = partial(fail, UpdateFailed("no room"))  # type: ignore[method-assign]
        await pool.members.update(Weights("/w", "v2", 2))
        assert pool.list[1].ready
        assert not pool.list[0].up
        assert "no room" in pool.list[0].fault

    run(test)


def test_an_update_while_all_servers_are_away_reaches_those_that_come_back() -> None:
    async def test(pool: Pool) -> None:
        pool.servers[0].alive = False
        await until(lambda: not pool.list[0].up)
        await pool.members.update(Weights("/w", "v2", 2))
        pool.servers[0].start_again()
        await until(lambda: pool.list[0].ready)
        assert pool.servers[0].version == "v2"

    run(test, names="a")


def test_an_update_that_finds_no_server_left_says_so() -> None:
    async def test(pool: Pool) -> None:
        own(pool, 0, FakeProcess(9, may_start_again=False))
        with pytest.raises(RolloutUnavailable, match="no vLLM server is left: a: it ended with status 9"):
            await pool.members.update(Weights("/w", "v2", 2))

    run_unwatched(test, "a")


def test_a_server_that_comes_back_during_an_update_has_the_newer_weights() -> None:
    async def test(pool: Pool) -> None:
        first, gate, loaded = pool.servers[0], asyncio.Event(), list[str]()

        async def load(path: str, version: str) -> None:
            loaded.append(version)
            await gate.wait()
            first.version = version

        first.alive = False
        await until(lambda: not pool.list[0].up)
        first.load = load  # type: ignore[method-assign]
        first.start_again()
        await until(lambda: loaded)
        await pool.members.update(Weights("/w", "v2", 2))
        gate.set()
        await until(lambda: pool.list[0].ready)
        assert (loaded, first.version) == (["v1", "v2"], "v2")

    run(test)


def test_a_look_at_the_version_that_began_before_one_asked_is_not_taken_for_an_answer() -> None:
    async def test(pool: Pool) -> None:
        server, gate, seen = pool.servers[0], asyncio.Event(), list[str | None]()
        server.weight_version = partial(held_until, gate, server, seen)  # type: ignore[method-assign]
        early = asyncio.create_task(pool.members.check_version(pool.list[0]))
        await until(lambda: seen)
        server.version = "another's"
        late = asyncio.create_task(pool.members.check_version(pool.list[0]))
        await asyncio.sleep(0)
        gate.set()
        await early
        with pytest.raises(ServerLost, match="it holds weights another's, not v1"):
            await late

    run(test, names="a")


def test_a_server_that_is_lost_while_its_version_is_asked_is_lost_and_the_watch_goes_on() -> None:
    async def test(pool: Pool) -> None:
        server, gate, seen = pool.servers[0], asyncio.Event(), list[str | None]()
        server.weight_version = partial(held_until, gate, server, seen)  # type: ignore[method-assign]
        asked = asyncio.create_task(pool.members.check_version(pool.list[0]))
        await until(lambda: seen)
        pool.members.lose(pool.list[0], pool.list[0].gone, "it went")
        gate.set()
        with pytest.raises(ServerLost, match="it went"):
            await asked
        await until(lambda: pool.list[0].ready)

    run(test, names="a")


# ---------------------------------------------------------------- health
def test_what_happens_during_a_long_update_is_still_noticed() -> None:
    async def test(pool: Pool) -> None:
        gate = asyncio.Event()
        pool.servers[0].load = lambda path, version: gate.wait()  # type: ignore[method-assign,assignment,return-value]
        updating = asyncio.create_task(pool.members.update(Weights("/w", "v1", 2)))
        await until(pool.list[0].lock.locked)
        for _ in range(2):
            await pool.members.changed()
        pool.servers[1].alive = False
        await until(lambda: not pool.list[1].up)
        gate.set()
        await updating

    run(test)


def test_a_server_that_is_back_is_set_up_anew_and_what_its_last_life_left_does_not_end_this_one() -> None:
    async def test(pool: Pool) -> None:
        member, first = pool.list[0], pool.servers[0]
        forgotten, life = list[str](), member.gone
        first.forget = lambda: forgotten.append(first.address)  # type: ignore[method-assign]
        first.alive = False
        await until(life.is_set)
        first.start_again()
        await until(lambda: member.ready)
        pool.members.lose(member, life, "too late")
        assert (member.ready, member.gone.is_set(), forgotten) == (True, False, ["a"])

    run(test)


def test_counts_are_those_since_the_last_call_of_the_servers_that_answer() -> None:
    async def test(pool: Pool) -> None:
        pool.servers[0].counters = partial(fail, ServerLost("busy"))  # type: ignore[attr-defined]
        pool.servers[1].counters = partial(answer, {"n": 5})  # type: ignore[attr-defined]
        assert await pool.members.count() == {"n": 5}
        pool.servers[1].counters = partial(answer, {"n": 7})  # type: ignore[attr-defined]
        assert await pool.members.count() == {"n": 2}
        assert all(member.ready for member in pool.list)

    run(test)


# ---------------------------------------------------------------- hope
def test_a_process_of_ours_that_is_lost_is_killed_and_its_end_told() -> None:
    async def test(pool: Pool) -> None:
        running, ended = FakeProcess(), FakeProcess(-9)
        for place, process in enumerate((running, ended)):
            own(pool, place, process)
            pool.members.lose(pool.list[place], pool.list[place].gone, "no answer")
        assert [member.fault for member in pool.list] == ["no answer", "it ended with status -9"]
        assert running.killed
        assert ended.killed

    run(test)


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_lost_server_has_as_long_to_come_back_as_its_kind_takes(is_ours: bool) -> None:
    async def test(pool: Pool) -> None:
        if is_ours:
            own(pool, 0, FakeProcess(-9))
        pool.list[0].up = True
        patience_s, start_timeout_s = (0.0, LONG_S) if is_ours else (LONG_S, 0.0)
        members = patient(pool, patience_s=patience_s, start_timeout_s=start_timeout_s)
        members.lose(pool.list[0], pool.list[0].gone, "gone")
        members.check_hope()
        if is_ours:
            own(pool, 0, FakeProcess(-9, may_start_again=False))
            with pytest.raises(RolloutUnavailable, match="no vLLM server is left: a: it ended with status -9"):
                members.check_hope()

    run_unwatched(test, "a")


def test_a_server_that_is_up_is_hope_enough() -> None:
    async def test(pool: Pool) -> None:
        await pool.members.start()
        assert pool.list[0].hope_ends_s == 0.0
        pool.members.check_hope()

    run_unwatched(test, "a")


@pytest.mark.parametrize("noticed", [True, False])
def test_a_process_that_was_started_again_begins_a_life_and_has_time_for_it(noticed: bool) -> None:
    async def test(pool: Pool) -> None:
        member, life = pool.list[0], pool.list[0].gone
        own(pool, 0, FakeProcess())
        member.up, member.fault = not noticed, "it had ended"
        members = patient(pool, patience_s=0.0, start_timeout_s=LONG_S)
        members.started_again(member, "status 1")
        assert (member.up, life.is_set()) == (False, not noticed)
        assert member.fault == ("it had ended" if noticed else "status 1")
        members.check_hope()

    run_unwatched(test, "a")
