"""REST: checkpoints, their files, verification, forks."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from app.checkpoints import service
from app.checkpoints.schemas import CheckpointOut, CheckpointsOut, FilesOut, VerificationOut
from app.idempotency import ApiRoute
from app.models import Checkpoint, Run
from app.runs.api import changed_config
from app.runs.schemas import ChangesIn, RunOut
from app.runs.service import fork_from_checkpoint, get_run
from app.security import Reader, Runner
from app.sessions import AppDatabase, AppStore, ReadSession, WriteSession

router = APIRouter(prefix="/checkpoints", tags=["checkpoints"], route_class=ApiRoute)


def checkpoint_out(view: service.CheckpointView) -> CheckpointOut:
    row = view.checkpoint
    own = {name: getattr(row, name) for name in CheckpointOut.model_fields if hasattr(row, name)}
    return CheckpointOut(**own, run_number=view.run_number, attempt=view.attempt, parent_step=view.parent_step)


@router.get("", response_model=CheckpointsOut)
def list_checkpoints(
    _: Reader,
    session: ReadSession,
    run: str | None = Query(None, description="Number or id; all runs without one"),
    limit: int = Query(100, ge=1, le=200),
    cursor: str | None = None,
) -> dict[str, Any]:
    """Checkpoints, newest first; those that retention removed stay listed as `removed`."""
    page = service.list_checkpoints(session, get_run(session, run) if run else None, limit=limit, cursor=cursor)
    return {"items": [checkpoint_out(view) for view in page.items], "next_cursor": page.next_cursor}


@router.get("/{checkpoint_id}")
def get_checkpoint(_: Reader, checkpoint_id: uuid.UUID, session: ReadSession) -> CheckpointOut:
    return checkpoint_out(service.view_of(session, service.get_checkpoint(session, checkpoint_id)))


@router.post("/{checkpoint_id}/verify")
def verify(_: Runner, checkpoint_id: uuid.UUID, database: AppDatabase, store: AppStore) -> VerificationOut:
    """Read every byte again and compare with the manifest."""
    result = service.verify(database, store, checkpoint_id)
    with database.read() as session:
        return VerificationOut(
            checkpoint=checkpoint_out(service.view_of(session, result.checkpoint)), damage=result.damage
        )


@router.post("/{checkpoint_id}/fork", status_code=201, response_model=RunOut)
def fork(user: Runner, checkpoint_id: uuid.UUID, body: ChangesIn, session: WriteSession) -> Run:
    """Queue a new run that goes on from this checkpoint with changed settings."""
    checkpoint = service.get_checkpoint(session, checkpoint_id)
    config = changed_config(session.get_one(Run, checkpoint.run_id), body)
    return fork_from_checkpoint(session, user, checkpoint, config)


@router.get("/{checkpoint_id}/files", response_model=FilesOut)
def list_files(_: Reader, checkpoint_id: uuid.UUID, session: ReadSession, store: AppStore) -> dict[str, Any]:
    return {"items": service.files(store, service.get_checkpoint(session, checkpoint_id))}


@router.get("/{checkpoint_id}/files/{path:path}", response_class=StreamingResponse)
def download_file(
    _: Reader, checkpoint_id: uuid.UUID, path: str, session: ReadSession, store: AppStore
) -> StreamingResponse:
    """One file of the checkpoint."""
    return file_response(service.get_checkpoint(session, checkpoint_id), path, store)


@router.get("/{checkpoint_id}/archive", response_class=StreamingResponse)
def download_archive(_: Reader, checkpoint_id: uuid.UUID, session: ReadSession, store: AppStore) -> StreamingResponse:
    """The whole folder as an uncompressed tar."""
    view = service.view_of(session, service.get_checkpoint(session, checkpoint_id))
    return archive_response(view, store)


def file_response(checkpoint: Checkpoint, path: str, store: AppStore) -> StreamingResponse:
    """Also used by the pages."""
    key = service.file_key(store, checkpoint, path)
    headers = {
        "Content-Disposition": f'attachment; filename="{path.rpartition("/")[2]}"',
        "Content-Length": str(store.size(key)),
    }
    return StreamingResponse(store.read_chunks(key), media_type="application/octet-stream", headers=headers)


def archive_response(view: service.CheckpointView, store: AppStore) -> StreamingResponse:
    """Also used by the pages."""
    checkpoint = view.checkpoint
    name = f"run-{view.run_number}-{checkpoint.stage}-{checkpoint.step:06d}"
    entries = service.files(store, checkpoint)
    headers = {
        "Content-Disposition": f'attachment; filename="{name}.tar"',
        "Content-Length": str(service.archive_size(entries, name)),
    }
    body = service.archive(store, checkpoint, entries, name)
    return StreamingResponse(body, media_type="application/x-tar", headers=headers)
