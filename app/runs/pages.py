"""Pages of one run by tab: overview, charts, checkpoints, findings, timeline. Log and config: about_pages."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.responses import JSONResponse, Response
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.checkpoints.pages import CheckpointRow, checkpoint_rows
from app.errors import Invalid
from app.findings.service import WarningView, list_warnings
from app.metrics import service as metrics
from app.metrics.display import ChartSet, all_charts, has_steps, overview_charts
from app.models import Attempt, Checkpoint, Run, Transition, User, Worker
from app.runs import service
from app.runs.frame import Frame, build_frame
from app.runs.side import FindingLine, Side, build_side, finding_lines
from app.security import Reader, allowed
from app.sessions import AppStore, ReadSession
from app.web import page, pages_router
from grpo_engine.errors import Problem

router = pages_router()
MAX_POINTS = 1500
MAX_SERIES = 200


# ---------------------------------------------------------------- overview and charts
@dataclass(frozen=True)
class OverviewContext:
    frame: Frame
    chart_set: ChartSet | None
    side: Side
    waiting_text: str
    waiting_command: str


@dataclass(frozen=True)
class ChartsContext:
    frame: Frame
    chart_set: ChartSet | None


def framed(session: Session, store: AppStore, run: Run, user: User, tab: str, stage: str = "") -> Frame:
    return build_frame(session, store, run, tab=tab, stage=stage, can_run=allowed(user, "run"))


@router.get("/runs/{number}")
def overview(
    request: Request, user: Reader, session: ReadSession, store: AppStore, number: str, stage: str = ""
) -> Response:
    run = service.get_run(session, number)
    frame = framed(session, store, run, user, "overview", stage)
    text, command = _waiting(session, run)
    context = OverviewContext(
        frame=frame,
        chart_set=overview_charts(run, frame.stage, frame.values) if has_steps(frame.values) else None,
        side=build_side(session, store, run, frame.stage, can_run=allowed(user, "run")),
        waiting_text=text,
        waiting_command=command,
    )
    return page(request, "runs/overview.html", context)


def _waiting(session: Session, run: Run) -> tuple[str, str]:
    if run.state == "queued":
        online = session.scalar(select(func.count()).select_from(Worker).where(Worker.state == "online"))
        if not online:
            return (
                "No worker is online. Charts of reward, length, entropy and KL grow here once one takes the run:",
                "cohort worker",
            )
        return "The run starts as soon as a worker with a free fitting device takes it; its charts then grow here.", ""
    if run.state in ("starting", "running"):
        return (
            "The engine loads model and data. Charts of reward, length, entropy and KL grow here with every step.",
            "",
        )
    return "The run ended before its first step; the log and the timeline say why.", ""


@router.get("/runs/{number}/charts")
def charts(
    request: Request, user: Reader, session: ReadSession, store: AppStore, number: str, stage: str = ""
) -> Response:
    run = service.get_run(session, number)
    frame = framed(session, store, run, user, "charts", stage)
    chart_set = all_charts(run, frame.stage, frame.values) if has_steps(frame.values) else None
    return page(request, "runs/charts.html", ChartsContext(frame, chart_set))


@router.get("/runs/{number}/series")
def series(
    _: Reader,
    session: ReadSession,
    number: str,
    stage: str,
    names: str,
    max_points: Annotated[int, Query(ge=10, le=10_000)] = MAX_POINTS,
) -> Response:
    """Points of a stage for the page's charts: [step, value, kind], steps as counted within the stage."""
    run = service.get_run(session, number)
    try:
        wanted = [str(name) for name in json.loads(names)][:MAX_SERIES]
    except (ValueError, TypeError) as error:
        raise Invalid.of(
            [Problem("names", names[:60], "is not a JSON list of metric names", 'such as ["loss"]')]
        ) from error
    found = metrics.series(session, run, wanted, max_points=max_points, stage=stage)
    longest = max(found, key=lambda entry: entry.total, default=None)
    return JSONResponse(
        {
            "stage": stage,
            "attempt": run.num_attempts,
            "series": {entry.name: [[p.step, p.value, p.kind] for p in entry.points] for entry in found},
            "hidden": {entry.name: entry.hidden for entry in found if entry.hidden},
            "marks": _marks(session, run, longest.takeovers if longest else []),
        },
        headers={"Cache-Control": "no-store"},
    )


def _marks(session: Session, run: Run, takeovers: list[metrics.PointData]) -> list[dict[str, Any]]:
    """Where a later attempt took over, with the steps it trained again."""
    repeated = {a.attempt.number: a.attempt.repeated_steps for a in service.list_attempts(session, run)}
    marks: list[dict[str, Any]] = []
    for point in takeovers:
        again = repeated.get(point.attempt, 0)
        note = f"attempt {point.attempt} trained {again} steps again" if again else ""
        marks.append({"x": point.step, "label": f"attempt {point.attempt}", "note": note})
    return marks


# ---------------------------------------------------------------- checkpoints and findings
@dataclass(frozen=True)
class RunCheckpointsContext:
    frame: Frame
    checkpoints: list[CheckpointRow]
    next_href: str
    checkpoint_text: str


@dataclass(frozen=True)
class FindingsContext:
    frame: Frame
    findings: list[FindingLine]
    warnings: list[WarningView]


@router.get("/runs/{number}/checkpoints")
def run_checkpoints(
    request: Request, user: Reader, session: ReadSession, store: AppStore, number: str, cursor: str | None = None
) -> Response:
    run = service.get_run(session, number)
    every = run.config["stages"][0]["checkpoint"]["every_steps"]
    text = f"The first is saved after {every} steps; each can be downloaded, loaded and started from."
    frame = framed(session, store, run, user, "checkpoints")
    rows, next_href = checkpoint_rows(session, run, cursor)
    return page(request, "runs/checkpoints.html", RunCheckpointsContext(frame, rows, next_href, text))


@router.get("/runs/{number}/findings")
def findings(request: Request, user: Reader, session: ReadSession, store: AppStore, number: str) -> Response:
    run = service.get_run(session, number)
    frame = framed(session, store, run, user, "findings")
    context = FindingsContext(frame, finding_lines(session, run), list_warnings(session, run))
    return page(request, "runs/findings.html", context)


# ---------------------------------------------------------------- timeline
@dataclass(frozen=True)
class AttemptRow:
    attempt: Attempt
    worker: str
    resumed_href: str
    resumed_text: str


@dataclass(frozen=True)
class TransitionRow:
    transition: Transition
    why: str


@dataclass(frozen=True)
class TimelineContext:
    frame: Frame
    attempts: list[AttemptRow]
    transitions: list[TransitionRow]
    repeated_text: str


@router.get("/runs/{number}/timeline")
def timeline(request: Request, user: Reader, session: ReadSession, store: AppStore, number: str) -> Response:
    run = service.get_run(session, number)
    attempts = [_attempt_row(session, view) for view in service.list_attempts(session, run)]
    repeated = sum(row.attempt.repeated_steps for row in attempts)
    context = TimelineContext(
        frame=framed(session, store, run, user, "timeline"),
        attempts=attempts,
        transitions=[TransitionRow(t, _why(t)) for t in reversed(service.list_transitions(session, run))],
        repeated_text=f"{repeated} steps were trained again; both versions can be read"
        if repeated
        else "no step was repeated",
    )
    return page(request, "runs/timeline.html", context)


def _attempt_row(session: Session, view: service.AttemptView) -> AttemptRow:
    origin = view.attempt.resumed_from_id
    checkpoint = session.get(Checkpoint, origin) if origin else None
    href = f"/checkpoints/{checkpoint.id}" if checkpoint else ""
    text = f"{checkpoint.stage}, step {checkpoint.step}" if checkpoint else ""
    return AttemptRow(view.attempt, view.worker_name or "–", href, text)


def _why(transition: Transition) -> str:
    return ": ".join(part for part in (transition.reason, transition.message) if part) or "–"
