"""Live run pages: one event stream a page, one poller a process and run.

The poller reads `runs.version`, which rises with every ingest and change of state. What a version looks like is
rendered once for each kind of viewer, however many watch. Event ids are versions: a reconnect that brings the newest id
gets nothing until the next change, any other gets everything again, so it heals itself. An ended run sends `done`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from fastapi import Request
from markupsafe import escape
from sqlalchemy import select
from sse_starlette import EventSourceResponse, ServerSentEvent

from app.artifacts import ArtifactStore
from app.db import Database
from app.metrics.display import has_steps, new_points
from app.models import Attempt, Run
from app.paging import WholeNumber
from app.runs import logs
from app.runs.frame import build_frame
from app.runs.log_view import TAIL_LINES
from app.runs.service import get_run
from app.runs.side import build_side
from app.runs.states import TERMINAL_STATES
from app.security import Reader, allowed, csrf_token
from app.web import pages_router, render_fragment

logger = logging.getLogger(__name__)
router = pages_router()
POLL_S = 0.4
PING_S = 15
TOKEN_PLACE = "csrf-token-of-the-viewer"
"""Stands in the fragments, which viewers share, where each gets the token of its own session."""


@dataclass(frozen=True)
class Marker:
    """What the poller sees of a run; pages are sent anew when it changes."""

    version: int
    state: str
    stage: str | None
    step: int
    attempt: int
    beat: datetime | None


# ---------------------------------------------------------------- the poller
class RunWatch:
    """Follows one run for all its viewers in this process."""

    def __init__(self, database: Database, run_id: uuid.UUID) -> None:
        self.database = database
        self.run_id = run_id
        self.viewers = 0
        self.marker: Marker | None = None
        self.gone = False
        self._changed = asyncio.Event()
        self._rendered: dict[Hashable, asyncio.Future[Any]] = {}
        self.task = asyncio.create_task(self._poll(), name=f"watch run {run_id}")

    async def _poll(self) -> None:
        while True:
            try:
                marker = await asyncio.to_thread(self._read)
                self.gone = marker is None
            except Exception:
                logger.warning("cannot read run %s; trying again", self.run_id, exc_info=True)
                marker = self.marker
            if marker != self.marker or self.gone:
                self.marker = marker
                self._rendered.clear()
                changed, self._changed = self._changed, asyncio.Event()
                changed.set()
            await asyncio.sleep(POLL_S)

    def _read(self) -> Marker | None:
        query = select(Run.version, Run.state, Run.stage, Run.step, Run.num_attempts, Attempt.last_beat_at)
        query = query.outerjoin(Attempt, (Attempt.run_id == Run.id) & (Attempt.number == Run.num_attempts))
        with self.database.read() as session:
            row = session.execute(query.where(Run.id == self.run_id)).one_or_none()
        return Marker(*row) if row is not None else None

    async def after(self, known: Marker | None) -> Marker | None:
        """The newest marker, once it differs from `known`; None when the run was deleted."""
        while self.marker is known and not self.gone:
            await self._changed.wait()
        return self.marker

    async def once(self, key: Hashable, render: Callable[[], Any]) -> Any:
        """The result of `render` in a thread, shared by everybody who asks for this key before the next change."""
        if key not in self._rendered:
            self._rendered[key] = asyncio.ensure_future(asyncio.to_thread(render))
        try:
            return await asyncio.shield(self._rendered[key])
        except Exception:
            self._rendered.pop(key, None)  # the next viewer tries again
            raise


class Hub:
    """The pollers of this process, each as long as it has a viewer."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.watches: dict[uuid.UUID, RunWatch] = {}

    @asynccontextmanager
    async def watch(self, run_id: uuid.UUID) -> AsyncIterator[RunWatch]:
        watch = self.watches.get(run_id) or self.watches.setdefault(run_id, RunWatch(self.database, run_id))
        watch.viewers += 1
        try:
            yield watch
        finally:
            watch.viewers -= 1
            if not watch.viewers:
                self.watches.pop(run_id, None)
                watch.task.cancel()


def get_hub(request: Request) -> Hub:
    hub: Hub | None = getattr(request.app.state, "hub", None)
    if hub is None:
        hub = request.app.state.hub = Hub(request.app.state.database)
    return hub


# ---------------------------------------------------------------- the stream
@dataclass
class Viewer:
    """One open page."""

    store: ArtifactStore
    run_id: uuid.UUID
    can_run: bool
    csrf: str
    tab: str
    stage: str
    known_version: int | None
    """Version the page was rendered with; None once anything was sent."""
    has_charts: bool
    follows: bool
    """The page shows whatever stage is current, so it begins again when the stage changes."""
    step: int
    log_end: int | None
    """Byte behind what the page shows of the log; None after a reconnect, when nobody knows."""
    attempt: int


@router.get("/runs/{number}/events")
def events(
    request: Request,
    user: Reader,
    number: str,
    tab: str = "overview",
    stage: str = "",
    version: int = 0,
    after: WholeNumber = 0,
    charts: bool = True,
    follow: bool = False,
    log_end: int = 0,
    attempt: int = 0,
) -> EventSourceResponse:
    with request.app.state.database.read() as session:
        run_id = get_run(session, number).id
    last = request.headers.get("Last-Event-ID", "")
    known, shown_end = (int(last), None) if last.isdecimal() else (version, log_end)
    viewer = Viewer(
        request.app.state.store, run_id, allowed(user, "run"), csrf_token(request), tab, stage, known, charts, follow,
        after, shown_end, attempt,
    )  # fmt: skip
    return EventSourceResponse(stream(get_hub(request), viewer), ping=PING_S, headers={"Vary": "Accept"})


async def stream(hub: Hub, viewer: Viewer) -> AsyncIterator[ServerSentEvent]:
    """Events for one page until its run has ended or it is closed."""
    async with hub.watch(viewer.run_id) as watch:
        marker: Marker | None = None
        while True:
            marker = await watch.after(marker)
            if marker is None:
                return
            known, viewer.known_version = viewer.known_version, None
            if known == marker.version and marker.state not in TERMINAL_STATES:
                continue  # the page was rendered with this version
            async for event in _events(watch, viewer, marker):
                yield event
            if marker.state in TERMINAL_STATES:
                yield ServerSentEvent(data="ended", event="done", id=str(marker.version))
                return


async def _events(watch: RunWatch, viewer: Viewer, marker: Marker) -> AsyncIterator[ServerSentEvent]:
    event_id = str(marker.version)
    shown_on = viewer.tab in ("overview", "charts")
    moved_on = viewer.follows and marker.stage not in (None, viewer.stage)
    if shown_on and moved_on:
        yield ServerSentEvent(data="stage", event="restart", id=event_id)
        return
    key = ("page", viewer.tab, viewer.stage, viewer.can_run)
    text, has_values = await watch.once(key, lambda: _fragments(watch.database, viewer))
    if shown_on and has_values and not viewer.has_charts:
        yield ServerSentEvent(data="first step", event="restart", id=event_id)
        return
    yield ServerSentEvent(data=text.replace(TOKEN_PLACE, viewer.csrf), id=event_id)
    if shown_on and viewer.has_charts:
        async for event in _point_events(watch, viewer, marker):
            yield event
    if viewer.tab == "log":
        async for event in _log_events(watch, viewer, marker):
            yield event


async def _point_events(watch: RunWatch, viewer: Viewer, marker: Marker) -> AsyncIterator[ServerSentEvent]:
    """Points from the viewer's last step on; an empty message tells it that another attempt began."""
    if marker.stage == viewer.stage:
        viewer.step = min(viewer.step, marker.step)
    after = viewer.step
    key = ("points", viewer.stage, after)
    series = await watch.once(key, lambda: _points(watch.database, viewer, after))
    changed, viewer.attempt = viewer.attempt != marker.attempt, marker.attempt
    if series or changed:
        viewer.step = max([after, *(points[-1][0] for points in series.values())])
        message = {"stage": viewer.stage, "attempt": marker.attempt, "series": series}
        yield ServerSentEvent(data=json.dumps(message, allow_nan=False), event="points", id=str(marker.version))


async def _log_events(watch: RunWatch, viewer: Viewer, marker: Marker) -> AsyncIterator[ServerSentEvent]:
    if viewer.attempt != marker.attempt:
        yield ServerSentEvent(data="attempt", event="restart", id=str(marker.version))
        return
    if viewer.log_end is None:
        piece = await watch.once("tail", partial(_log_tail, viewer, marker.attempt))
        viewer.log_end = piece.end
        yield ServerSentEvent(data=_partial("run-log", str(escape(piece.text)), "innerHTML"), id=str(marker.version))
    while True:  # a piece is bounded; an ended run's stream closes after this, so nothing may be left
        end = viewer.log_end
        piece = await watch.once(("log", end), partial(_log_piece, viewer, marker.attempt, end))
        if not piece.text:
            return
        viewer.log_end = piece.end
        text = _partial("run-log", str(escape(piece.text)), "beforeend")
        yield ServerSentEvent(data=text, id=str(marker.version))


# ---------------------------------------------------------------- rendering, in threads
def _fragments(database: Database, viewer: Viewer) -> tuple[str, bool]:
    with database.read() as session:
        run = session.get_one(Run, viewer.run_id)
        frame = build_frame(session, viewer.store, run, tab=viewer.tab, stage=viewer.stage, can_run=viewer.can_run)
        values: dict[str, Any] = {"frame": frame, "csrf_token": TOKEN_PLACE}
        parts = [
            ("run-head", "runs/_run.html", "head"),
            ("run-kpis", "runs/_run.html", "kpis"),
            ("run-tabs", "runs/_run.html", "tabs"),
        ]
        if viewer.tab == "overview":
            values["side"] = build_side(session, viewer.store, run, frame.stage, can_run=viewer.can_run)
            parts.append(("run-side", "runs/overview.html", "side"))
    pieces = [_partial(target, render_fragment(template, block, values)) for target, template, block in parts]
    return "".join(pieces), has_steps(frame.values)


def _partial(target: str, html: str, swap: str = "innerMorph") -> str:
    return f'<hx-partial hx-target="#{target}" hx-swap="{swap}">{html}</hx-partial>'


def _points(database: Database, viewer: Viewer, after: int) -> dict[str, list[list[Any]]]:
    with database.read() as session:
        return new_points(session, session.get_one(Run, viewer.run_id), viewer.stage, after)


def _log_tail(viewer: Viewer, attempt: int) -> logs.LogPiece:
    return logs.tail(viewer.store, logs.log_key(viewer.run_id, attempt), TAIL_LINES)


def _log_piece(viewer: Viewer, attempt: int, end: int) -> logs.LogPiece:
    return logs.read_after(viewer.store, logs.log_key(viewer.run_id, attempt), end)
