"""The live stream of a run: one poller, one rendering, points from the viewer's step on, no task left behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from fastapi import FastAPI
from sqlalchemy import delete, select
from sse_starlette import ServerSentEvent

from app import live
from app.db import Database
from app.live import Hub, Viewer, stream
from app.models import Attempt, Point, Run, Series, utc_now
from app.runs.service import get_run
from app.runs.states import transition

LIMIT_S = 15


@pytest.fixture
def running(seeded_app: FastAPI) -> Run:
    with seeded_app.state.database.read() as session:
        return get_run(session, 2)


def viewer(app: FastAPI, run: Run, **changes: Any) -> Viewer:
    usual: dict[str, Any] = {
        "store": app.state.store, "run_id": run.id, "can_run": True, "csrf": "token-of-mine", "tab": "overview",
        "stage": "1-rl", "known_version": None, "has_charts": True, "follows": True, "step": 13, "log_end": 0,
        "attempt": run.num_attempts,
    }  # fmt: skip
    return Viewer(**(usual | changes))


def in_time(work: Callable[[], Awaitable[None]]) -> None:
    """Run it on an event loop of its own, for LIMIT_S at most."""

    async def bounded() -> None:
        await asyncio.wait_for(work(), LIMIT_S)

    asyncio.run(bounded())


async def take(events: AsyncIterator[ServerSentEvent], count: int) -> list[ServerSentEvent]:
    return [await anext(events) for _ in range(count)]


def end(app: FastAPI, run: Run) -> None:
    with app.state.database.write() as session:
        assert transition(session, run.id, "completed", actor="test", reason="finished", message="done")


def bump(app: FastAPI, run: Run) -> None:
    with app.state.database.write() as session:
        session.get_one(Run, run.id).version += 1


def test_a_viewer_gets_the_fragments_and_the_points_from_its_step_on(seeded_app: FastAPI, running: Run) -> None:
    async def work() -> None:
        page, points = await take(stream(Hub(seeded_app.state.database), viewer(seeded_app, running)), 2)
        assert page.id == points.id == str(running.version)
        assert page.event is None
        for target in ("#run-head", "#run-kpis", "#run-tabs", "#run-side"):
            assert f'<hx-partial hx-target="{target}" hx-swap="innerMorph">' in str(page.data)
        assert 'value="token-of-mine"' in str(page.data)
        message = json.loads(str(points.data))
        assert points.event == "points"
        assert [step for step, _, _ in message["series"]["reward/mean"]] == [13, 14, 15]

    in_time(work)


def test_the_stream_of_an_ended_run_closes(seeded_app: FastAPI, running: Run) -> None:
    async def work() -> None:
        events = stream(Hub(seeded_app.state.database), viewer(seeded_app, running, step=15))
        await take(events, 2)
        end(seeded_app, running)
        rest = [event async for event in events]
        assert "✓ completed" in str(rest[0].data)
        assert rest[-1].event == "done"

    in_time(work)


def test_a_long_log_comes_whole_before_the_stream_of_an_ended_run_closes(seeded_app: FastAPI, running: Run) -> None:
    lines = "".join(f"line {number} of a long log\n" for number in range(20_000))
    path = seeded_app.state.settings.attempt_folder(running.id, running.num_attempts) / "engine.log"
    path.write_text(lines)
    end(seeded_app, running)

    async def scenario() -> None:
        hub = Hub(seeded_app.state.database)
        events = [event async for event in stream(hub, viewer(seeded_app, running, tab="log"))]
        told = "".join(str(event.data) for event in events if "run-log" in str(event.data))
        assert told.count("of a long log") == 20_000
        assert events[-1].event == "done"

    in_time(scenario)


def test_a_log_that_reconnects_begins_again_with_its_tail(seeded_app: FastAPI, running: Run) -> None:
    path = seeded_app.state.settings.attempt_folder(running.id, running.num_attempts) / "engine.log"
    path.write_text("one line\n")

    async def scenario() -> None:
        hub = Hub(seeded_app.state.database)
        events = stream(hub, viewer(seeded_app, running, tab="log", log_end=None))
        _, tail = await take(events, 2)
        assert 'hx-swap="innerHTML">one line\n<' in str(tail.data)
        path.write_text("one line\nanother\n")
        [more] = await take(events, 1)
        assert 'hx-swap="beforeend">another\n<' in str(more.data)

    in_time(scenario)


def test_a_page_rendered_with_this_version_gets_nothing_until_the_next(seeded_app: FastAPI, running: Run) -> None:
    async def work() -> None:
        known = viewer(seeded_app, running, known_version=running.version)
        events = stream(Hub(seeded_app.state.database), known)
        first = asyncio.ensure_future(anext(events))
        await asyncio.sleep(3 * live.POLL_S)
        assert not first.done()
        bump(seeded_app, running)
        assert (await first).id == str(running.version + 1)
        await events.aclose()  # type: ignore[attr-defined]

    in_time(work)


def test_many_viewers_share_one_poller_and_one_rendering(
    seeded_app: FastAPI, running: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[str] = []
    fragments = live._fragments

    def counted(database: Database, shown: Viewer) -> tuple[str, bool]:
        rendered.append(shown.csrf)
        return fragments(database, shown)

    monkeypatch.setattr(live, "_fragments", counted)

    async def work() -> None:
        hub = Hub(seeded_app.state.database)
        streams = [stream(hub, viewer(seeded_app, running, csrf=f"token {i}")) for i in range(20)]
        firsts = await asyncio.gather(*[anext(events) for events in streams])
        assert len(hub.watches) == 1
        assert len(rendered) == 1
        assert [f'value="token {i}"' in str(event.data) for i, event in enumerate(firsts)] == [True] * 20
        for events in streams:
            await events.aclose()  # type: ignore[attr-defined]

    in_time(work)


def test_a_viewer_that_leaves_leaves_no_task(seeded_app: FastAPI, running: Run) -> None:
    async def work() -> None:
        before = asyncio.all_tasks()
        hub = Hub(seeded_app.state.database)
        watching = asyncio.create_task(read_all(stream(hub, viewer(seeded_app, running))))
        while not hub.watches or next(iter(hub.watches.values())).marker is None:
            await asyncio.sleep(0.01)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await asyncio.sleep(2 * live.POLL_S)
        assert hub.watches == {}
        assert asyncio.all_tasks() == before

    in_time(work)


async def read_all(events: AsyncIterator[ServerSentEvent]) -> None:
    async for _ in events:
        pass


def test_the_page_begins_again_when_its_stage_has_ended(seeded_app: FastAPI, running: Run) -> None:
    async def work() -> None:
        events = stream(Hub(seeded_app.state.database), viewer(seeded_app, running, stage="0-sft"))
        assert (await anext(events)).event == "restart"

    in_time(work)


def test_a_chosen_stage_is_kept(seeded_app: FastAPI, running: Run) -> None:
    async def work() -> None:
        kept = viewer(seeded_app, running, stage="0-sft", follows=False, step=30)
        events = stream(Hub(seeded_app.state.database), kept)
        assert (await anext(events)).event is None

    in_time(work)


def test_another_attempt_is_named_so_that_the_charts_are_read_again(seeded_app: FastAPI, running: Run) -> None:
    async def work() -> None:
        events = stream(Hub(seeded_app.state.database), viewer(seeded_app, running, attempt=0, step=99))
        _, points = await take(events, 2)
        assert json.loads(str(points.data))["attempt"] == 1

    in_time(work)


def test_a_deleted_run_ends_its_streams(seeded_app: FastAPI, running: Run) -> None:
    async def work() -> None:
        gone = viewer(seeded_app, running)
        gone.run_id = type(gone.run_id)(int=1)
        assert [event async for event in stream(Hub(seeded_app.state.database), gone)] == []

    in_time(work)


def test_the_page_begins_again_at_the_first_step_not_at_the_evaluation_before_it(
    seeded_app: FastAPI, running: Run
) -> None:
    with seeded_app.state.database.write() as session:
        evaluation = Series.name.startswith("evaluation/")
        own = select(Attempt.id).where(Attempt.run_id == running.id)
        steps = select(Series.id).where(Series.attempt_id.in_(own), Series.stage == "1-rl", ~evaluation)
        session.execute(delete(Point).where(Point.series_id.in_(steps)))

    async def work() -> None:
        events = stream(Hub(seeded_app.state.database), viewer(seeded_app, running, has_charts=False))
        assert (await anext(events)).event is None
        with seeded_app.state.database.write() as session:
            first = session.scalars(steps).first()
            session.add(Point(series_id=first, step=1, value=0.5, kind=None, time=utc_now()))
            session.get_one(Run, running.id).version += 1
        assert (await anext(events)).event == "restart"

    in_time(work)
