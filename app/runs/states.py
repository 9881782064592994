"""States of runs and attempts: one table each, one guarded UPDATE a change.

    queued ─► starting ─► running ─► completed | failed
       ▲ ▲        │           │
       │ └────────┴───────────┤  attempt lost, worker shut down
       │                      ├─► pausing ─► paused ─► queued
       │                      └─► cancelling ─► cancelled

Terminal states are final. `cancelled` is written when the processes are gone or the attempt was declared lost.
Functions take a session and never commit; False or None means that nothing was changed.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import ColumnElement, CursorResult, exists, func, select, update
from sqlalchemy.orm import Session

from app.models import Attempt, Run, Transition, utc_now

TRANSITIONS: Mapping[str, frozenset[str]] = {
    "queued": frozenset({"starting", "paused", "cancelled"}),
    "starting": frozenset({"running", "queued", "pausing", "cancelling", "completed", "failed"}),
    "running": frozenset({"queued", "pausing", "cancelling", "completed", "failed"}),
    "pausing": frozenset({"paused", "cancelling", "completed", "failed"}),
    "paused": frozenset({"queued", "cancelled"}),
    "cancelling": frozenset({"cancelled", "completed"}),
    "completed": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
}
"""Source -> targets. A run that finished before it could obey a pause or cancel is completed."""

ATTEMPT_TRANSITIONS: Mapping[str, frozenset[str]] = {
    "starting": frozenset({"running", "stopping", "finished", "failed", "stopped", "lost"}),
    "running": frozenset({"stopping", "finished", "failed", "stopped", "lost"}),
    "stopping": frozenset({"finished", "failed", "stopped", "lost"}),
    "finished": frozenset(),
    "failed": frozenset(),
    "stopped": frozenset(),
    "lost": frozenset(),
}

RUN_STATES = frozenset(TRANSITIONS)
TERMINAL_STATES = frozenset(state for state, targets in TRANSITIONS.items() if not targets)
HELD_STATES = frozenset({"starting", "running", "pausing", "cancelling"})
"""States in which an attempt holds the run."""
ACTIVE_ATTEMPT_STATES = frozenset(state for state, targets in ATTEMPT_TRANSITIONS.items() if targets)


def sources_of(target: str) -> frozenset[str]:
    """States from which a run may go to `target`."""
    return frozenset(source for source, targets in TRANSITIONS.items() if target in targets)


def transition(
    session: Session,
    run_id: uuid.UUID,
    target: str,
    *,
    actor: str,
    reason: str | None = None,
    message: str | None = None,
    sources: Iterable[str] | None = None,
    token: str | None = None,
    restart: bool = False,
) -> bool:
    """Move a run to `target` and record who did it and why; False when the table, `sources` or `token` forbid it.

    `token`: only while this is the token of the run's newest attempt and that attempt is active.
    `restart`: count the change as one of the run's restarts.
    """
    allowed = sources_of(target) if sources is None else sources_of(target) & frozenset(sources)
    found = session.execute(select(Run.state, Run.num_attempts).where(Run.id == run_id).with_for_update()).one_or_none()
    if found is None or found.state not in allowed:
        return False
    statement = update(Run).where(Run.id == run_id, Run.state == found.state)
    if token is not None:
        statement = statement.where(_holds(token))
    changes = _changes(target, reason, message) | ({"restarts": Run.restarts + 1} if restart else {})
    if _rows(session.execute(statement.values(changes), execution_options={"synchronize_session": "fetch"})) != 1:
        return False
    number = found.num_attempts + (target == "starting")
    session.add(
        Transition(
            run_id=run_id,
            attempt_number=number or None,
            source=found.state,
            target=target,
            reason=reason,
            message=message,
            actor=actor,
            at=utc_now(),
        )
    )
    return True


def _changes(target: str, reason: str | None, message: str | None) -> dict[str, Any]:
    now = utc_now()
    changes: dict[str, Any] = {"state": target, "reason": reason, "message": message, "version": Run.version + 1}
    if target == "queued":
        changes["queued_at"] = now
    if target == "starting":
        changes["num_attempts"] = Run.num_attempts + 1
        changes["started_at"] = func.coalesce(Run.started_at, now)
    if target in TERMINAL_STATES:
        changes["ended_at"] = now
    return changes


def _holds(token: str) -> ColumnElement[bool]:
    return exists().where(
        Attempt.run_id == Run.id,
        Attempt.number == Run.num_attempts,
        Attempt.token == token,
        Attempt.state.in_(ACTIVE_ATTEMPT_STATES),
    )


def request_cancel(session: Session, run_id: uuid.UUID, *, actor: str) -> str | None:
    """Cancel now (nothing is running) or ask the worker to; the run's new state, None when it cannot be cancelled."""
    message = f"cancelled by {actor}"
    if transition(
        session, run_id, "cancelled", actor=actor, reason="cancelled", message=message, sources=("queued", "paused")
    ):
        return "cancelled"
    return "cancelling" if transition(session, run_id, "cancelling", actor=actor, message=message) else None


def request_pause(session: Session, run_id: uuid.UUID, *, actor: str) -> str | None:
    """Pause now (nothing is running) or ask the worker to; the run's new state, None when it cannot be paused."""
    message = f"paused by {actor}"
    if transition(session, run_id, "paused", actor=actor, reason="paused", message=message, sources=("queued",)):
        return "paused"
    return "pausing" if transition(session, run_id, "pausing", actor=actor, message=message) else None


def request_resume(session: Session, run_id: uuid.UUID, *, actor: str) -> str | None:
    """Queue a paused run again; "queued", or None when it is not paused."""
    return "queued" if transition(session, run_id, "queued", actor=actor, sources=("paused",)) else None


def move_attempt(
    session: Session,
    attempt_id: uuid.UUID,
    target: str,
    *,
    token: str | None = None,
    beats: int | None = None,
    reason: str | None = None,
    message: str | None = None,
    traceback: str | None = None,
) -> bool:
    """Move an attempt to `target`; False when it has ended, `token` is not its own or `beats` has moved on."""
    allowed = [source for source, targets in ATTEMPT_TRANSITIONS.items() if target in targets]
    statement = update(Attempt).where(Attempt.id == attempt_id, Attempt.state.in_(allowed))
    if token is not None:
        statement = statement.where(Attempt.token == token)
    if beats is not None:
        statement = statement.where(Attempt.beats == beats)
    changes: dict[str, Any] = {"state": target, "reason": reason, "message": message, "traceback": traceback}
    if target == "running":
        changes["started_at"] = utc_now()
    if target not in ACTIVE_ATTEMPT_STATES:
        changes["ended_at"] = utc_now()
    return _rows(session.execute(statement.values(changes), execution_options={"synchronize_session": "fetch"})) == 1


def lose_attempt(
    session: Session, attempt_id: uuid.UUID, *, actor: str, message: str, beats: int | None = None
) -> str | None:
    """Declare an attempt lost and say what becomes of its run; None when it has ended or its beats moved on.

    starting, running -> queued, or failed (worker_lost) past max_restarts; pausing -> paused; cancelling -> cancelled.
    """
    attempt = session.get_one(Attempt, attempt_id)
    run = session.get_one(Run, attempt.run_id, with_for_update=True, populate_existing=True)
    if not move_attempt(session, attempt_id, "lost", beats=beats, reason="worker_lost", message=message):
        return None
    if run.state == "cancelling":
        target, reason = "cancelled", "cancelled"
    elif run.state == "pausing":
        target, reason = "paused", "paused"
    elif run.restarts < run.max_restarts:
        target, reason = "queued", "worker_lost"
    else:
        target, reason = "failed", "worker_lost"
        message = f"{message}; {run.max_restarts} restarts are used up"
    moved = transition(
        session,
        run.id,
        target,
        actor=actor,
        reason=reason,
        message=message,
        sources=HELD_STATES,
        restart=target == "queued",
    )
    return target if moved else None


def _rows(result: Any) -> int:
    assert isinstance(result, CursorResult)
    return result.rowcount
