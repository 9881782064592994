"""REST: engine logs of a run's attempts."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from app.idempotency import ApiRoute
from app.paging import WholeNumber
from app.runs import log_view, logs, service
from app.runs.api import RunRef
from app.runs.schemas import LogHitsOut, LogOut
from app.security import Reader
from app.sessions import AppStore, ReadSession

router = APIRouter(prefix="/runs/{run}/log", tags=["runs"], route_class=ApiRoute)
AttemptNumber = Annotated[WholeNumber | None, Query(description="The newest without one")]


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
    key = logs.log_key(row.run_id, row.number)
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
    hits = logs.search(store, logs.log_key(row.run_id, row.number), text, context=context, limit=limit)
    return {"attempt": row.number, "items": hits}


@router.get("/download", response_class=StreamingResponse)
def download_log(
    _: Reader, run: RunRef, session: ReadSession, store: AppStore, attempt: AttemptNumber = None
) -> StreamingResponse:
    """The whole log as a text file."""
    found = service.get_run(session, run)
    return log_view.download(store, found, service.get_attempt(session, found, attempt))
