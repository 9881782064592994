"""Pages of checkpoints: of all runs, of one, its files, the check of its hashes, downloads."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote

from fastapi import Request
from fastapi.responses import Response
from sqlalchemy import select
from sqlalchemy.orm import Session

from app.artifacts import Entry
from app.checkpoints import service
from app.checkpoints.api import archive_response, file_response
from app.errors import AppError
from app.metrics.display import display
from app.models import Checkpoint, Run
from app.security import Reader, Runner
from app.sessions import AppDatabase, AppStore, ReadSession
from app.web import page, pages_router, redirect
from grpo_engine.diagnostics.catalogue import METRICS, info

router = pages_router()
SHOWN = ("evaluation/accuracy_greedy", "reward/mean", "loss", "sft/token_accuracy")


@dataclass(frozen=True)
class CheckpointRow:
    checkpoint: Checkpoint
    run_number: int
    run_name: str
    attempt: int
    metrics_text: str
    parent_text: str
    usable: bool


@dataclass(frozen=True)
class CheckpointsContext:
    rows: list[CheckpointRow]
    next_href: str


@dataclass(frozen=True)
class CheckpointContext:
    row: CheckpointRow
    files: list[Entry]
    files_error: str
    parts: list[tuple[str, str, int]]
    """What it holds, the folder, bytes."""
    metrics: list[tuple[str, str]]
    parent_href: str
    folder: str


@router.get("/checkpoints")
def list_checkpoints(request: Request, _: Reader, session: ReadSession, cursor: str | None = None) -> Response:
    found = service.list_checkpoints(session, cursor=cursor, removed=False)
    names = _names(session, found.items)
    rows = [_row(view, names[view.checkpoint.run_id]) for view in found.items]
    next_href = f"/checkpoints?cursor={quote(found.next_cursor)}" if found.next_cursor else ""
    return page(request, "checkpoints/list.html", CheckpointsContext(rows, next_href))


def checkpoint_rows(session: Session, run: Run, cursor: str | None = None) -> tuple[list[CheckpointRow], str]:
    """A page of a run's checkpoints, newest first, those that retention removed included; address of the next page."""
    found = service.list_checkpoints(session, run, cursor=cursor)
    next_href = f"/runs/{run.number}/checkpoints?cursor={quote(found.next_cursor)}" if found.next_cursor else ""
    return [_row(view, run.name) for view in found.items], next_href


def _names(session: Session, views: list[service.CheckpointView]) -> dict[uuid.UUID, str]:
    ids = {view.checkpoint.run_id for view in views}
    rows = session.execute(select(Run.id, Run.name).where(Run.id.in_(ids)))
    return {row.id: row.name for row in rows}


def metric_texts(metrics: Mapping[str, float]) -> dict[str, str]:
    """Values by the catalogue's names: a checkpoint keeps its evaluation's without their prefix."""
    named = {f"evaluation/{name}" if f"evaluation/{name}" in METRICS else name: v for name, v in metrics.items()}
    return {name: " ".join(display(name, value)).strip() for name, value in sorted(named.items())}


def _row(view: service.CheckpointView, name: str) -> CheckpointRow:
    row = view.checkpoint
    metrics = metric_texts(row.metrics)
    shown = [f"{info(name).label.lower()} {metrics[name]}" for name in SHOWN if name in metrics]
    parent = f"step {view.parent_step}" if view.parent_step is not None else "–"
    usable = row.state not in ("damaged", "removed")
    return CheckpointRow(row, view.run_number, name, view.attempt, ", ".join(shown[:2]) or "–", parent, usable)


@router.get("/checkpoints/{checkpoint_id}")
def show(request: Request, _: Reader, session: ReadSession, store: AppStore, checkpoint_id: uuid.UUID) -> Response:
    row = service.get_checkpoint(session, checkpoint_id)
    view = service.view_of(session, row)
    run = session.get_one(Run, row.run_id)
    files: list[Entry] = []
    problem = ""
    try:
        files = service.files(store, row)
    except AppError as error:
        problem = error.detail
    local = store.local_path(row.path)
    context = CheckpointContext(
        row=_row(view, run.name),
        files=files,
        files_error=problem,
        parts=service.parts_of(files),
        metrics=[(info(name).label, text) for name, text in metric_texts(row.metrics).items()],
        parent_href=f"/checkpoints/{row.parent_id}" if view.parent_step is not None else "",
        folder=str(local) if local else row.path,
    )
    return page(request, "checkpoints/show.html", context)


@router.post("/checkpoints/{checkpoint_id}/verify")
def verify(_: Runner, database: AppDatabase, store: AppStore, checkpoint_id: uuid.UUID) -> Response:
    url = f"/checkpoints/{checkpoint_id}"
    try:
        damage = service.verify(database, store, checkpoint_id).damage
    except AppError as error:
        return redirect(url, error.detail, "bad")
    if damage:
        return redirect(url, "Damaged: " + "; ".join(damage[:5]), "bad")
    return redirect(url, "Every byte was read again and is as it was written.")


@router.get("/checkpoints/{checkpoint_id}/download")
def download(_: Reader, session: ReadSession, store: AppStore, checkpoint_id: uuid.UUID) -> Response:
    """The whole folder as a tar stream."""
    return archive_response(service.view_of(session, service.get_checkpoint(session, checkpoint_id)), store)


@router.get("/checkpoints/{checkpoint_id}/files/{path:path}")
def download_file(_: Reader, session: ReadSession, store: AppStore, checkpoint_id: uuid.UUID, path: str) -> Response:
    return file_response(service.get_checkpoint(session, checkpoint_id), path, store)
