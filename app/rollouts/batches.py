"""The rollout batches of a run, in the order they were sampled."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from app.errors import NotFound
from app.models import Attempt, RolloutBatch, Run
from app.paging import Key, Page, after, checked_limit, decode_cursor, encode_cursor, order_by


@dataclass(frozen=True, slots=True)
class BatchView:
    attempt: int
    batch: int
    stage: str
    step: int | None
    """Step that trained on it; None until one did."""
    num_groups: int
    num_completions: int
    key: str


_KEYS = [Key(Attempt.number.expression), Key(RolloutBatch.batch.expression)]


BatchQuery = Select[RolloutBatch, int]


def batch_query(run: Run) -> BatchQuery:
    """A run's batches with their attempt's number, in the order they were sampled."""
    query = select(RolloutBatch, Attempt.number).join(Attempt, Attempt.id == RolloutBatch.attempt_id)
    return query.where(Attempt.run_id == run.id).order_by(*order_by(_KEYS))


def after_batch(query: BatchQuery, attempt: int, batch: int) -> BatchQuery:
    return query.where(after(_KEYS, [attempt, batch]))


def batch_view(row: RolloutBatch, attempt: int) -> BatchView:
    return BatchView(attempt, row.batch, row.stage, row.step, row.num_groups, row.num_completions, row.path)


def list_batches(
    session: Session,
    run: Run,
    *,
    stage: str | None = None,
    step: int | None = None,
    attempt: int | None = None,
    limit: int = 100,
    cursor: str | None = None,
) -> Page[BatchView]:
    """One page of batches, in the order they were sampled."""
    query = _filtered(batch_query(run), stage, step, attempt).limit(checked_limit(limit) + 1)
    if cursor:
        query = query.where(after(_KEYS, decode_cursor("batches", cursor)))
    rows = [batch_view(row, number) for row, number in session.execute(query)]
    items = rows[: checked_limit(limit)]
    more = len(rows) > len(items)
    return Page(items, encode_cursor("batches", [items[-1].attempt, items[-1].batch]) if more else None)


def _filtered(query: BatchQuery, stage: str | None, step: int | None, attempt: int | None) -> BatchQuery:
    wanted = ((RolloutBatch.stage, stage), (RolloutBatch.step, step), (Attempt.number, attempt))
    return query.where(*[column == value for column, value in wanted if value is not None])


def get_batch(session: Session, run: Run, attempt: int, batch: int) -> BatchView:
    """Raises NotFound."""
    query = batch_query(run).where(Attempt.number == attempt, RolloutBatch.batch == batch)
    found = session.execute(query).one_or_none()
    if found is None:
        raise NotFound(f"Run {run.number} has no batch {batch} in attempt {attempt}.")
    return batch_view(found[0], found[1])


def batches_of_step(session: Session, run: Run, stage: str, step: int, attempt: int | None = None) -> list[BatchView]:
    """Batches that one step trained on: of this attempt, else of the newest that did the step."""
    rows = session.execute(_filtered(batch_query(run), stage, step, attempt))
    found = [batch_view(row, number) for row, number in rows]
    newest = max((view.attempt for view in found), default=0)
    return [view for view in found if view.attempt == newest]
