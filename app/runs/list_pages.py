"""Page of all runs: filter, sort, progress at a glance."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from urllib.parse import urlencode

from fastapi import Request
from fastapi.responses import Response
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.models import Attempt, Run, Worker
from app.runs import service
from app.runs.frame import TONES
from app.runs.states import TERMINAL_STATES
from app.security import Reader
from app.sessions import ReadSession
from app.web import ACTIVE, page, pages_router

router = pages_router()
SORT_COLUMNS = ("name", "state", "last_reward", "created_at")


@dataclass(frozen=True)
class RunRow:
    run: Run
    worker: str
    share_done: int
    progress_text: str
    tone: str


@dataclass(frozen=True)
class SortLink:
    name: str
    label: str
    href: str
    direction: str
    """ascending or descending when the list is in this order, else empty."""


@dataclass(frozen=True)
class RunsContext:
    rows: list[RunRow]
    sorts: dict[str, SortLink]
    next_href: str
    state: str
    tag: str
    text: str
    tags: list[str]
    states: list[str]
    num_runs: int
    filtered: bool
    active: bool
    """A run of the page may still change, so its rows are asked for again."""
    here: str


@router.get("/runs")
def list_runs(
    request: Request,
    _: Reader,
    session: ReadSession,
    state: str = "",
    tag: str = "",
    text: str = "",
    sort: str = "-created_at",
    cursor: str | None = None,
) -> Response:
    states = ACTIVE if state == "active" else (state,) if state else ()
    filters = service.RunFilters(states, tag or None, text.strip() or None)
    found = service.list_runs(session, filters, sort=sort, cursor=cursor)
    query = {"state": state, "tag": tag, "text": text}
    context = RunsContext(
        rows=_rows(session, found.items),
        sorts={name: _sort_link(name, sort, query) for name in SORT_COLUMNS},
        next_href=_href("/runs", {**query, "sort": sort, "cursor": found.next_cursor}) if found.next_cursor else "",
        state=state,
        tag=tag,
        text=text,
        tags=service.list_tags(session),
        states=["active", "queued", "running", "paused", "completed", "failed", "cancelled"],
        num_runs=session.scalar(select(func.count()).select_from(Run)) or 0,
        filtered=bool(state or tag or text),
        active=any(run.state not in TERMINAL_STATES and run.state != "paused" for run in found.items),
        here=_href("/runs", {**query, "sort": sort, "cursor": cursor}),
    )
    block = "rows" if request.headers.get("HX-Target", "").endswith("#runs") else None
    return page(request, "runs/list.html", context, block=block)


def _rows(session: Session, runs: list[Run]) -> list[RunRow]:
    workers = _workers_of(session, runs)
    return [RunRow(run, workers.get(run.id, ""), _share(run), _progress(run), TONES.get(run.state, "")) for run in runs]


def _progress(run: Run) -> str:
    if run.state == "completed":
        return (
            f"{run.steps_done} of {run.total_steps}" if run.steps_done < run.total_steps else f"{run.total_steps} steps"
        )
    return f"{run.stage} {run.step}/{run.stage_steps}" if run.num_attempts else f"{run.total_steps} steps"


def _share(run: Run) -> int:
    return 100 if run.state == "completed" else round(100 * run.steps_done / max(run.total_steps, 1))


def _workers_of(session: Session, runs: list[Run]) -> dict[uuid.UUID, str]:
    query = select(Attempt.run_id, Worker.name).join(Worker, Worker.id == Attempt.worker_id)
    rows = session.execute(query.where(Attempt.run_id.in_([run.id for run in runs])).order_by(Attempt.number))
    return {row.run_id: row.name for row in rows}


def _sort_link(name: str, sort: str, query: dict[str, str]) -> SortLink:
    current = sort.removeprefix("-") == name
    down = sort.startswith("-") if current else False
    other = name if down or (not current and name in ("name", "state")) else f"-{name}"
    direction = ("descending" if down else "ascending") if current else ""
    return SortLink(name, name, _href("/runs", {**query, "sort": other}), direction)


def _href(path: str, query: dict[str, str | None]) -> str:
    kept = {name: value for name, value in query.items() if value}
    return f"{path}?{urlencode(kept)}" if kept else path
