"""Findings: what the detectors concluded about runs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.models import Attempt, FindingRow, JournalEvent, Run
from app.paging import Key, Page, after, checked_limit, decode_cursor, encode_cursor, order_by

_KEYS = [Key(FindingRow.id.expression, descending=True)]


@dataclass(frozen=True, slots=True)
class FindingView:
    finding: FindingRow
    run_number: int
    attempt: int


def list_findings(
    session: Session,
    run: Run | None = None,
    *,
    only_open: bool = False,
    limit: int = 100,
    cursor: str | None = None,
) -> Page[FindingView]:
    """One page of a run's findings (of all runs without one), newest first."""
    query = (
        select(FindingRow, Run.number, Attempt.number)
        .join(Run, Run.id == FindingRow.run_id)
        .join(Attempt, Attempt.id == FindingRow.attempt_id)
        .order_by(*order_by(_KEYS))
        .limit(checked_limit(limit) + 1)
    )
    if run is not None:
        query = query.where(FindingRow.run_id == run.id)
    if only_open:
        query = query.where(FindingRow.state == "open")
    if cursor:
        query = query.where(after(_KEYS, decode_cursor("findings", cursor)))
    rows = [FindingView(*row) for row in session.execute(query)]
    items = rows[: checked_limit(limit)]
    return Page(items, encode_cursor("findings", [items[-1].finding.id]) if len(rows) > len(items) else None)


MAX_WARNINGS = 50


@dataclass(frozen=True, slots=True)
class WarningView:
    """A warning of the engine, or a journal line that could not be read."""

    message: str
    stage: str | None
    attempt: int
    at: datetime


def list_warnings(session: Session, run: Run) -> list[WarningView]:
    """The run's newest warnings, at most MAX_WARNINGS."""
    query = (
        select(JournalEvent.payload, JournalEvent.stage, Attempt.number, JournalEvent.time)
        .join(Attempt, Attempt.id == JournalEvent.attempt_id)
        .where(Attempt.run_id == run.id, JournalEvent.type == "warning")
        .order_by(Attempt.number.desc(), JournalEvent.seq.desc())
        .limit(MAX_WARNINGS)
    )
    rows = session.execute(query)
    return [WarningView(str(payload["message"]), stage, number, at) for payload, stage, number, at in rows]
