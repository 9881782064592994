"""Runs: find them, read their history, steer them. Launching, importing and deleting are offered here too.

States change only through app.runs.states.
"""

from __future__ import annotations

import json
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, String, cast, or_, select, update
from sqlalchemy.orm import InstrumentedAttribute, Session

from app.errors import Conflict, Invalid, NotFound
from app.models import Attempt, EvaluationResult, JournalEvent, Run, Transition, User, Worker, utc_now
from app.paging import Key, Page, after, checked_limit, decode_cursor, encode_cursor, order_by
from app.runs import states
from app.runs.deletion import check_deletable, delete_run, remove_files
from app.runs.importing import import_run
from app.runs.launching import actor_name, clone_config, create_run, fork_from_checkpoint
from app.sessions import announce_work
from grpo_engine.errors import Problem

__all__ = [
    "AttemptView",
    "RunFilters",
    "actor_name",
    "cancel",
    "check_deletable",
    "clone_config",
    "create_run",
    "delete_run",
    "early_stopping_state",
    "fork_from_checkpoint",
    "get_attempt",
    "get_run",
    "git_commit",
    "import_run",
    "list_attempts",
    "list_evaluations",
    "list_runs",
    "list_tags",
    "list_transitions",
    "newest_event",
    "pause",
    "remove_files",
    "resume",
    "set_early_stopping",
]

SORTS: dict[str, tuple[InstrumentedAttribute[Any], bool]] = {
    "number": (Run.number, False),
    "name": (Run.name, False),
    "state": (Run.state, False),
    "steps_done": (Run.steps_done, False),
    "last_reward": (Run.last_reward, True),
    "created_at": (Run.created_at, False),
    "started_at": (Run.started_at, True),
    "ended_at": (Run.ended_at, True),
}
"""Sort name -> column, nullable. A leading minus sorts downwards."""


@dataclass(frozen=True, slots=True)
class RunFilters:
    states: tuple[str, ...] = ()
    tag: str | None = None
    text: str | None = None
    """In name or tags, upper and lower case alike."""


@dataclass(frozen=True, slots=True)
class AttemptView:
    attempt: Attempt
    worker_name: str | None


# ---------------------------------------------------------------- find
def get_run(session: Session, reference: str | int | uuid.UUID) -> Run:
    """By number or id. Raises NotFound."""
    run = None
    if isinstance(reference, int) or (isinstance(reference, str) and reference.isdecimal() and len(reference) < 10):
        run = session.scalar(select(Run).where(Run.number == int(reference)))
    else:
        with suppress(ValueError):
            run = session.get(Run, reference if isinstance(reference, uuid.UUID) else uuid.UUID(str(reference)))
    if run is None:
        raise NotFound(f"There is no run {str(reference)[:60]}.")
    return run


def list_runs(
    session: Session, filters: RunFilters, *, sort: str = "-number", limit: int = 50, cursor: str | None = None
) -> Page[Run]:
    """One page of runs. Raises Invalid for an unknown sort, BadRequest for a cursor of another order."""
    keys = _sort_keys(sort)
    query = select(Run).where(*_conditions(filters)).order_by(*order_by(keys)).limit(checked_limit(limit) + 1)
    if cursor:
        query = query.where(after(keys, decode_cursor(sort, cursor)))
    rows = list(session.scalars(query))
    items = rows[: checked_limit(limit)]
    more = len(rows) > len(items)
    return Page(items, encode_cursor(sort, _sort_values(items[-1], sort)) if more else None)


def _sort_keys(sort: str) -> list[Key]:
    name = sort.removeprefix("-")
    if name not in SORTS:
        problem = Problem("sort", sort[:60], "is no order of runs", f"use one of {', '.join(SORTS)}, with - for down")
        raise Invalid.of([problem])
    column, nullable = SORTS[name]
    first = Key(column.expression, sort.startswith("-"), nullable)
    return [first] if name == "number" else [first, Key(Run.number.expression, descending=True)]


def _sort_values(run: Run, sort: str) -> list[Any]:
    name = sort.removeprefix("-")
    return [getattr(run, name)] if name == "number" else [getattr(run, name), run.number]


def _conditions(filters: RunFilters) -> list[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = []
    if filters.states:
        found.append(Run.state.in_(filters.states))
    tags = cast(Run.tags, String)
    if filters.tag:
        found.append(tags.contains(json.dumps(filters.tag), autoescape=True))
    if filters.text:
        in_tags = tags.icontains(json.dumps(filters.text)[1:-1], autoescape=True)
        found.append(or_(Run.name.icontains(filters.text, autoescape=True), in_tags))
    return found


def list_tags(session: Session) -> list[str]:
    """Every tag in use, sorted."""
    return sorted({tag for tags in session.scalars(select(Run.tags)) for tag in tags})


def list_attempts(session: Session, run: Run) -> list[AttemptView]:
    """Newest first."""
    query = select(Attempt, Worker.name).outerjoin(Worker, Worker.id == Attempt.worker_id)
    rows = session.execute(query.where(Attempt.run_id == run.id).order_by(Attempt.number.desc()))
    return [AttemptView(attempt, name) for attempt, name in rows]


def get_attempt(session: Session, run: Run, number: int | None = None) -> Attempt:
    """This attempt, the newest without a number. Raises NotFound."""
    query = select(Attempt).where(Attempt.run_id == run.id).order_by(Attempt.number.desc()).limit(1)
    attempt = session.scalar(query.where(Attempt.number == number) if number is not None else query)
    if attempt is None:
        what = f"no attempt {number}" if number is not None else "no attempt yet; a worker makes one when it starts it"
        raise NotFound(f"Run {run.number} has {what}.")
    return attempt


def list_transitions(session: Session, run: Run) -> list[Transition]:
    return list(session.scalars(select(Transition).where(Transition.run_id == run.id).order_by(Transition.id)))


def list_evaluations(session: Session, run: Run) -> list[tuple[EvaluationResult, int]]:
    """Every evaluation with its attempt's number, in the order of training."""
    query = select(EvaluationResult, Attempt.number).join(Attempt, Attempt.id == EvaluationResult.attempt_id)
    ordered = query.where(Attempt.run_id == run.id).order_by(Attempt.number, EvaluationResult.seq)
    return list(session.execute(ordered))


def newest_event(session: Session, run: Run, kind: str) -> JournalEvent | None:
    """The run's newest journal event of a type, such as `early_stopping`."""
    query = select(JournalEvent).join(Attempt, Attempt.id == JournalEvent.attempt_id)
    query = query.where(Attempt.run_id == run.id, JournalEvent.type == kind)
    return session.scalar(query.order_by(Attempt.number.desc(), JournalEvent.seq.desc()).limit(1))


def git_commit(session: Session, run: Run) -> str | None:
    """Commit of the code that the newest attempt ran on; None before the first."""
    started = newest_event(session, run, "started")
    return run.git_commit or (started.payload.get("git_commit") if started else None)


def early_stopping_state(session: Session, run: Run) -> dict[str, Any] | None:
    """Payload of the newest `early_stopping` event; None before the first."""
    event = newest_event(session, run, "early_stopping")
    return dict(event.payload) if event else None


# ---------------------------------------------------------------- steer
def cancel(session: Session, run: Run, actor: User | None) -> Run:
    """Raises Conflict when the run has ended or is being cancelled."""
    return _asked(session, run, states.request_cancel(session, run.id, actor=actor_name(actor)), "cancelled")


def pause(session: Session, run: Run, actor: User | None) -> Run:
    """The worker saves a checkpoint and frees the device. Raises Conflict in other states than queued and running."""
    return _asked(session, run, states.request_pause(session, run.id, actor=actor_name(actor)), "paused")


def resume(session: Session, run: Run, actor: User | None) -> Run:
    """Queue a paused run again. Raises Conflict in other states."""
    changed = _asked(session, run, states.request_resume(session, run.id, actor=actor_name(actor)), "resumed")
    announce_work(session)
    return changed


def _asked(session: Session, run: Run, state: str | None, what: str) -> Run:
    session.refresh(run)
    if state is None:
        raise Conflict(f"Run {run.number} is {run.state} and cannot be {what}.")
    return run


def set_early_stopping(session: Session, run: Run, actor: User | None, mode: str | None) -> Run:
    """Override early stopping: off, observe or stop; None is the config's. Raises Conflict after the end."""
    live = Run.state.not_in(states.TERMINAL_STATES)
    changes = {"early_stopping_override": mode, "version": Run.version + 1}
    if not session.scalar(update(Run).where(Run.id == run.id, live).values(changes).returning(Run.id)):
        raise Conflict(f"Run {run.number} is {run.state}; early stopping no longer acts on it.")
    note = f"early stopping set to {mode} by {actor_name(actor)}" if mode else "early stopping back to the config"
    session.add(
        Transition(
            run_id=run.id, source=run.state, target=run.state, actor=actor_name(actor), message=note, at=utc_now()
        )
    )
    session.flush()
    session.refresh(run)
    return run
