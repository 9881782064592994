"""REST: engine logs of a run's attempts."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from app.idempotency import ApiRoute
from app.models import Attempt
from app.paging import WholeNumber
from app.runs import logs, service
from app.runs.api import RunRef
from app.runs.schemas import LogHitsOut, LogOut
from app.security import Reader
from app.sessions import AppStore, ReadSession
from app.settings import Settings

router = APIRouter(prefix="/runs/{run}/log", tags=["runs"], route_class=ApiRoute)
AttemptNumber = Annotated[WholeNumber | None, Query(description="The newest without one")]


def log_key(attempt: Attempt) -> str:
    return f"{Settings.attempt_key(attempt.run_id, attempt.number)}/{logs.LOG_NAME}"


@router.get("")
def read_log(
    _: Reader,
    run: RunRef,
    session: ReadSession,
    store: AppStore,
    attempt: AttemptNumber = None,
    tail: Annotated[int, Query(ge=0, le=10_000)] = 200,
    after: Annotated[int | None, Query(ge=0, description="Byte: whole lines behind it instead of the tail")] = None,
) -> LogOut:
    """The end of the engine's log, or what came after a byte."""
    row = service.get_attempt(session, service.get_run(session, run), attempt)
    key = log_key(row)
    piece = logs.tail(store, key, tail) if after is None else logs.read_after(store, key, after)
    return LogOut(attempt=row.number, text=piece.text, start=piece.start, end=piece.end, size=piece.size)


@router.get("/search", response_model=LogHitsOut)
def search_log(
    _: Reader,
    run: RunRef,
    session: ReadSession,
    store: AppStore,
    text: Annotated[str, Query(min_length=1, max_length=1000)],
    attempt: AttemptNumber = None,
    context: Annotated[int, Query(ge=0, le=20)] = 2,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> dict[str, Any]:
    """Lines that contain a text, with the lines around them."""
    row = service.get_attempt(session, service.get_run(session, run), attempt)
    return {"attempt": row.number, "items": logs.search(store, log_key(row), text, context=context, limit=limit)}


@router.get("/download", response_class=StreamingResponse)
def download_log(
    _: Reader, run: RunRef, session: ReadSession, store: AppStore, attempt: AttemptNumber = None
) -> StreamingResponse:
    """The whole log as a text file."""
    found = service.get_run(session, run)
    row = service.get_attempt(session, found, attempt)
    name = f"run-{found.number}-attempt-{row.number}.log"
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    store.size(log_key(row))
    return StreamingResponse(store.read_chunks(log_key(row)), media_type="text/plain; charset=utf-8", headers=headers)
