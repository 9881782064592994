"""Findings: what the detectors concluded about runs."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.models import Attempt, FindingRow, Run
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
