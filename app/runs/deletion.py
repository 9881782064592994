"""Deleting an ended run: its files first, then its rows, so that a failure can be tried again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from app.artifacts import ArtifactStore
from app.errors import Conflict
from app.models import (
    Attempt,
    Checkpoint,
    EvaluationResult,
    FindingRow,
    JournalEvent,
    Point,
    Replay,
    RolloutBatch,
    Run,
    SelfTestRow,
    Series,
    Transition,
)
from app.runs import states


def check_deletable(session: Session, run: Run) -> None:
    """Raises Conflict unless the run has ended and no run still to be trained begins at one of its checkpoints."""
    if run.state not in states.TERMINAL_STATES:
        raise Conflict(f"Run {run.number} is {run.state}; cancel it before deleting it.")
    checkpoints = select(Checkpoint.id).where(Checkpoint.run_id == run.id)
    waiting = select(Run.number).where(
        Run.parent_checkpoint_id.in_(checkpoints), Run.state.not_in(states.TERMINAL_STATES)
    )
    child = session.scalar(waiting.limit(1))
    if child is not None:
        raise Conflict(f"Run {child} begins at a checkpoint of run {run.number}; wait for its end or cancel it.")


def remove_files(store: ArtifactStore, run: Run) -> None:
    """Remove everything the run wrote; files already gone are no error. Raises Conflict naming what is left."""
    try:
        store.remove(f"runs/{run.id}")
    except OSError as error:
        detail = f"{error.filename or run.id} could not be removed ({error.strerror}); nothing else was, try again."
        raise Conflict(detail) from error


def delete_run(session: Session, run: Run) -> None:
    """Remove every row of an ended run. Call `remove_files` first: rows without files can be deleted again."""
    check_deletable(session, run)
    attempts = select(Attempt.id).where(Attempt.run_id == run.id)
    series = select(Series.id).where(Series.attempt_id.in_(attempts))
    session.execute(delete(Point).where(Point.series_id.in_(series)))
    by_attempt: Sequence[Any] = (Series, JournalEvent, RolloutBatch, EvaluationResult, SelfTestRow)
    for table in by_attempt:
        session.execute(delete(table).where(table.attempt_id.in_(attempts)))
    by_run: Sequence[Any] = (Checkpoint, FindingRow, Replay, Transition, Attempt)
    for table in by_run:
        session.execute(delete(table).where(table.run_id == run.id))
    session.execute(delete(Run).where(Run.id == run.id))
