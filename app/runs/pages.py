"""Pages of runs: the list, and one run by tab: overview, charts, checkpoints, findings, timeline, log, config."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any
from urllib.parse import urlencode

import yaml
from fastapi import Form, Query, Request
from fastapi.responses import JSONResponse, Response
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.checkpoints.pages import CheckpointRow, checkpoint_rows
from app.errors import Conflict, Invalid
from app.metrics import service as metrics
from app.metrics.display import ChartSet, all_charts, overview_charts
from app.models import Attempt, Checkpoint, NamedConfig, Run, Transition, User
from app.runs import log_view, service
from app.runs.frame import TONES, Frame, build_frame
from app.runs.log_view import LogContext
from app.runs.side import FindingLine, Side, build_side, finding_lines
from app.runs.states import TERMINAL_STATES
from app.security import Reader, Runner, allowed
from app.sessions import AppStore, ReadSession, WriteSession
from app.web import page, pages_router, redirect
from grpo_engine.errors import Problem

router = pages_router()
SORT_COLUMNS = ("name", "state", "last_reward", "created_at")
MAX_POINTS = 1500


# ---------------------------------------------------------------- list
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
    states = ("starting", "running", "pausing", "cancelling") if state == "active" else (state,) if state else ()
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


def _workers_of(session: Session, runs: list[Run]) -> dict[Any, str]:
    from app.models import Worker

    query = select(Attempt.run_id, Worker.name).join(Worker, Worker.id == Attempt.worker_id)
    rows = session.execute(query.where(Attempt.run_id.in_([run.id for run in runs])).order_by(Attempt.number))
    return {run_id: name for run_id, name in rows}


def _sort_link(name: str, sort: str, query: dict[str, str]) -> SortLink:
    current = sort.removeprefix("-") == name
    down = sort.startswith("-") if current else False
    other = name if down or (not current and name in ("name", "state")) else f"-{name}"
    direction = ("descending" if down else "ascending") if current else ""
    return SortLink(name, name, _href("/runs", {**query, "sort": other}), direction)


def _href(path: str, query: dict[str, str | None]) -> str:
    kept = {name: value for name, value in query.items() if value}
    return f"{path}?{urlencode(kept)}" if kept else path


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
        chart_set=overview_charts(run, frame.stage, frame.values) if frame.values or run.state == "running" else None,
        side=build_side(session, store, run, can_run=allowed(user, "run")),
        waiting_text=text,
        waiting_command=command,
    )
    return page(request, "runs/overview.html", context)


def _waiting(session: Session, run: Run) -> tuple[str, str]:
    from app.models import Worker

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
    chart_set = all_charts(run, frame.stage, frame.values) if frame.values else None
    return page(request, "runs/charts.html", ChartsContext(frame, chart_set))


@router.get("/runs/{number}/series")
def series(
    _: Reader,
    session: ReadSession,
    number: str,
    stage: str,
    names: str,
    max_points: Annotated[int, Query(le=10_000)] = MAX_POINTS,
) -> Response:
    """Points of a stage for the page's charts: [step, value, kind], steps as counted within the stage."""
    run = service.get_run(session, number)
    try:
        wanted = [str(name) for name in json.loads(names)][:100]
    except (ValueError, TypeError) as error:
        raise Invalid.of(
            [Problem("names", names[:60], "is not a JSON list of metric names", 'such as ["loss"]')]
        ) from error
    found = metrics.series(session, run, wanted, max_points=max_points)
    return JSONResponse(
        {
            "stage": stage,
            "attempt": run.num_attempts,
            "series": {s.name: [[p.step, p.value, p.kind] for p in s.points if p.stage == stage] for s in found},
            "hidden": {s.name: s.hidden for s in found if s.hidden},
            "marks": _marks(session, run, stage, found),
        },
        headers={"Cache-Control": "no-store"},
    )


def _marks(session: Session, run: Run, stage: str, found: list[metrics.SeriesData]) -> list[dict[str, Any]]:
    """Where a later attempt took over, with the steps it trained again."""
    repeated = {a.attempt.number: a.attempt.repeated_steps for a in service.list_attempts(session, run)}
    marks: list[dict[str, Any]] = []
    points = max((s.points for s in found), key=len, default=[])
    previous = None
    for point in (p for p in points if p.stage == stage):
        if previous is not None and point.attempt != previous:
            again = repeated.get(point.attempt, 0)
            note = f"attempt {point.attempt} trained {again} steps again" if again else ""
            marks.append({"x": point.step, "label": f"attempt {point.attempt}", "note": note})
        previous = point.attempt
    return marks


# ---------------------------------------------------------------- checkpoints and findings
@dataclass(frozen=True)
class RunCheckpointsContext:
    frame: Frame
    checkpoints: list[CheckpointRow]
    checkpoint_text: str


@dataclass(frozen=True)
class FindingsContext:
    frame: Frame
    findings: list[FindingLine]


@router.get("/runs/{number}/checkpoints")
def run_checkpoints(request: Request, user: Reader, session: ReadSession, store: AppStore, number: str) -> Response:
    run = service.get_run(session, number)
    every = run.config["stages"][0]["checkpoint"]["every_steps"]
    text = f"The first one is saved after {every} steps and at the end of every stage; each can be downloaded, loaded and forked."
    frame = framed(session, store, run, user, "checkpoints")
    return page(request, "runs/checkpoints.html", RunCheckpointsContext(frame, checkpoint_rows(session, run), text))


@router.get("/runs/{number}/findings")
def findings(request: Request, user: Reader, session: ReadSession, store: AppStore, number: str) -> Response:
    run = service.get_run(session, number)
    frame = framed(session, store, run, user, "findings")
    return page(request, "runs/findings.html", FindingsContext(frame, finding_lines(session, run)))


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


# ---------------------------------------------------------------- log
@router.get("/runs/{number}/log")
def log(
    request: Request,
    user: Reader,
    session: ReadSession,
    store: AppStore,
    number: str,
    search: str = "",
    attempt: int | None = None,
) -> Response:
    run = service.get_run(session, number)
    frame = framed(session, store, run, user, "log")
    context = log_view.build(session, store, run, frame, search.strip(), attempt)
    return page(request, "runs/log.html", context)


@router.get("/runs/{number}/attempts/{attempt}/engine.log")
def download_log(_: Reader, session: ReadSession, store: AppStore, number: str, attempt: int) -> Response:
    run = service.get_run(session, number)
    return log_view.download(store, run, service.get_attempt(session, run, attempt))


# ---------------------------------------------------------------- config
@dataclass(frozen=True)
class ConfigContext:
    frame: Frame
    yaml: str
    config_hash: str
    git_commit: str | None
    config_href: str
    config_name: str
    parent_href: str
    parent_label: str
    parent_text: str
    reward_sources: list[tuple[str, str]]
    owner: str
    created_at: datetime
    versions: list[tuple[str, str]]


@router.get("/runs/{number}/config")
def config(request: Request, user: Reader, session: ReadSession, store: AppStore, number: str) -> Response:
    run = service.get_run(session, number)
    named = session.get(NamedConfig, run.config_id) if run.config_id else None
    owner = session.get(User, run.owner_id) if run.owner_id else None
    started = service.newest_event(session, run, "started")
    parent = _parent(session, run)
    context = ConfigContext(
        frame=framed(session, store, run, user, "config"),
        yaml=_yaml(run),
        config_hash=run.config_hash,
        git_commit=run.git_commit,
        config_href=f"/configs/{named.name}/{named.version}" if named else "",
        config_name=f"{named.name}, version {named.version}" if named else "",
        parent_href=parent[0],
        parent_label=parent[1],
        parent_text=parent[2],
        reward_sources=sorted(run.reward_sources.items()),
        owner=owner.name if owner else "import" if run.imported else "–",
        created_at=run.created_at,
        versions=sorted((started.payload.get("versions") or {}).items()) if started else [],
    )
    return page(request, "runs/config.html", context)


def _parent(session: Session, run: Run) -> tuple[str, str, str]:
    checkpoint = session.get(Checkpoint, run.parent_checkpoint_id) if run.parent_checkpoint_id else None
    origin = session.get(Run, run.parent_run_id) if run.parent_run_id else None
    if checkpoint is not None:
        where = f"#{origin.number}, " if origin else ""
        return (
            f"/checkpoints/{checkpoint.id}",
            "starts at checkpoint",
            f"{where}{checkpoint.stage}, step {checkpoint.step}",
        )
    return (f"/runs/{origin.number}", "cloned from", f"#{origin.number}") if origin else ("", "", "")


def _yaml(run: Run) -> str:
    return str(yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True, width=100))


@router.get("/runs/{number}/config.yaml")
def download_config(_: Reader, session: ReadSession, number: str) -> Response:
    run = service.get_run(session, number)
    disposition = f'attachment; filename="run-{run.number}.yaml"'
    return Response(_yaml(run), media_type="application/yaml", headers={"Content-Disposition": disposition})


# ---------------------------------------------------------------- steer
@router.post("/runs/{number}/pause")
def pause(user: Runner, session: WriteSession, number: str) -> Response:
    return _steered(service.pause, user, session, number, "The run saves a checkpoint and frees its device.")


@router.post("/runs/{number}/resume")
def resume(user: Runner, session: WriteSession, number: str) -> Response:
    return _steered(service.resume, user, session, number, "The run is queued again.")


@router.post("/runs/{number}/cancel")
def cancel(user: Runner, session: WriteSession, number: str) -> Response:
    return _steered(service.cancel, user, session, number, "The run is being cancelled.")


def _steered(act: Any, user: User, session: Session, number: str, words: str) -> Response:
    run = service.get_run(session, number)
    try:
        act(session, run, user)
    except Conflict as error:
        return redirect(f"/runs/{number}", error.detail, "warn")
    return redirect(f"/runs/{number}", words)


@router.post("/runs/{number}/early-stopping")
def early_stopping(user: Runner, session: WriteSession, number: str, mode: Annotated[str, Form()]) -> Response:
    run = service.get_run(session, number)
    if mode not in ("off", "observe", "stop"):
        raise Invalid.of([Problem("mode", mode[:40], "is no mode of early stopping", "use off, observe or stop")])
    try:
        service.set_early_stopping(session, run, user, mode)
    except Conflict as error:
        return redirect(f"/runs/{number}", error.detail, "warn")
    words = {
        "off": "Early stopping is off.",
        "observe": "Early stopping only observes.",
        "stop": "Early stopping may stop the run.",
    }
    return redirect(f"/runs/{number}", words[mode])


@router.post("/runs/{number}/delete")
def delete(user: Runner, session: WriteSession, store: AppStore, number: str) -> Response:
    run = service.get_run(session, number)
    service.check_deletable(session, run)
    service.remove_files(store, run)
    name = run.name
    service.delete_run(session, run)
    return redirect("/runs", f"Run #{number}, {name}, is deleted.")
