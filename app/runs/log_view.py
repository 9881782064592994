"""The log tab: the cause first when the run failed, then the tail or what a search found."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastapi.responses import StreamingResponse
from sqlalchemy.orm import Session

from app.artifacts import ArtifactStore
from app.formatting import size
from app.models import Attempt, Run
from app.runs import logs, service
from app.runs.frame import Frame

TAIL_LINES = 400


@dataclass(frozen=True)
class LogLine:
    number: int
    text: str
    hit: bool
    gap: bool
    """Lines before it were left out."""


@dataclass(frozen=True)
class LogContext:
    frame: Frame
    search: str
    attempt: int
    attempt_numbers: list[int]
    exists: bool
    about: str
    download_href: str
    cause_title: str
    cause_lines: str
    hits: list[LogLine]
    tail: str


def build(
    session: Session, store: ArtifactStore, run: Run, frame: Frame, search: str, number: int | None
) -> LogContext:
    attempts = [view.attempt for view in service.list_attempts(session, run)]
    chosen = next((a for a in attempts if number in (None, a.number)), None)
    key = logs.log_key(run.id, chosen.number) if chosen else ""
    tail = logs.tail(store, key, TAIL_LINES) if key else logs.LogPiece("", 0, 0, 0)
    failed = chosen is not None and chosen.state == "failed"
    follows = bool(frame.stream) and not search and (chosen is None or chosen is attempts[0])
    return LogContext(
        frame=_streaming(frame, tail.end)
        if follows
        else replace(frame, stream=frame.stream.replace("tab=log", "tab=config")),
        search=search,
        attempt=chosen.number if chosen else 0,
        attempt_numbers=[a.number for a in attempts],
        exists=tail.size > 0,
        about=f"last {TAIL_LINES} lines of {size(tail.size)}" if tail.start else size(tail.size),
        download_href=f"{frame.url}/attempts/{chosen.number}/engine.log" if chosen else "",
        cause_title=f"{chosen.reason}: {chosen.message}" if failed and chosen else "",
        cause_lines=(chosen.traceback or "").rstrip() if failed and chosen and not frame.cause else "",
        hits=_lines(logs.search(store, key, search)) if search and key else [],
        tail="" if search else tail.text,
    )


def _streaming(frame: Frame, end: int) -> Frame:
    """The page's stream begins where its log ends."""
    return replace(frame, stream=f"{frame.stream}&log_end={end}")


def _lines(hits: list[logs.LogHit]) -> list[LogLine]:
    """Hits with their context, each line once, in order."""
    found: dict[int, tuple[str, bool]] = {}
    for hit in hits:
        first = hit.line_number - len(hit.before)
        for offset, text in enumerate([*hit.before, hit.line, *hit.after]):
            number = first + offset
            is_hit = number == hit.line_number or found.get(number, ("", False))[1]
            found[number] = (text, is_hit)
    numbers = sorted(found)
    return [LogLine(n, *found[n], gap=i > 0 and n != numbers[i - 1] + 1) for i, n in enumerate(numbers)]


def download(store: ArtifactStore, run: Run, attempt: Attempt) -> StreamingResponse:
    """The whole log as a text file. Raises NotFound."""
    key = logs.log_key(run.id, attempt.number)
    store.size(key)
    headers = {"Content-Disposition": f'attachment; filename="run-{run.number}-attempt-{attempt.number}.log"'}
    return StreamingResponse(store.read_chunks(key), media_type="text/plain; charset=utf-8", headers=headers)
