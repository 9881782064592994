"""Runs: launch, find, steer, fork, delete. States change only through app.runs.states."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, String, cast, delete, func, or_, select, text, update
from sqlalchemy.orm import InstrumentedAttribute, Session

from app.artifacts import ArtifactStore
from app.errors import Conflict, Invalid, NotFound
from app.models import (
    Attempt,
    Checkpoint,
    EvaluationResult,
    FindingRow,
    JournalEvent,
    Point,
    RewardSource,
    RolloutBatch,
    Run,
    Series,
    Transition,
    User,
    Worker,
    utc_now,
)
from app.paging import Key, Page, after, checked_limit, decode_cursor, encode_cursor, order_by
from app.rewards.service import sources_for
from app.runs import states
from app.sessions import announce_work
from grpo_engine.config import RunConfig
from grpo_engine.errors import Problem

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
_NUMBER_LOCK = 0x636F686F
"""Advisory lock under which PostgreSQL gives out run numbers."""


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


def actor_name(actor: User | None) -> str:
    return actor.name if actor else "local"


# ---------------------------------------------------------------- launch
def create_run(
    session: Session,
    actor: User | None,
    config: RunConfig,
    *,
    reward_hashes: Mapping[str, str] | None = None,
    config_id: uuid.UUID | None = None,
    parent_run_id: uuid.UUID | None = None,
    parent_checkpoint_id: uuid.UUID | None = None,
) -> Run:
    """Queue a run of this config; workers are told after the commit.

    Raises Invalid when a custom reward is not registered."""
    sources = sources_for(session, config, reward_hashes)
    run = new_run(session, config, sources, owner=actor)
    run.config_id = config_id
    run.parent_run_id = parent_run_id
    run.parent_checkpoint_id = parent_checkpoint_id
    run.state = "queued"
    run.queued_at = utc_now()
    session.flush()
    record_start(session, run, actor_name(actor), "queued by its owner")
    announce_work(session)
    return run


def new_run(session: Session, config: RunConfig, sources: Mapping[str, RewardSource], *, owner: User | None) -> Run:
    """A row with the config frozen into it, not yet in any state."""
    run = Run(
        number=_next_number(session),
        name=config.name,
        tags=list(config.tags),
        config=config.model_dump(mode="json"),
        config_hash=config.hash(),
        reward_sources={name: source.hash for name, source in sources.items()},
        owner_id=owner.id if owner else None,
        priority=config.priority,
        needs=config.needs.model_dump(mode="json"),
        max_restarts=config.max_restarts,
        stage=config.stage_key(0),
        stage_steps=config.stages[0].num_steps,
        total_steps=config.total_steps(),
        sparkline=[],
        version=1,
    )
    session.add(run)
    return run


def record_start(session: Session, run: Run, actor: str, message: str) -> None:
    """The transition that a run begins with."""
    session.add(
        Transition(run_id=run.id, source=None, target=run.state, actor=actor, message=message, at=utc_now())
    )
    session.flush()


def _next_number(session: Session) -> int:
    if session.get_bind().dialect.name == "postgresql":
        session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _NUMBER_LOCK})
    return (session.scalar(select(func.max(Run.number))) or 0) + 1


def clone_config(run: Run) -> dict[str, Any]:
    """The run's resolved config, to be edited and launched again."""
    return json.loads(json.dumps(run.config))  # type: ignore[no-any-return]


def fork_from_checkpoint(
    session: Session, actor: User | None, checkpoint: Checkpoint, config: RunConfig, **hashes: str
) -> Run:
    """Queue a run that goes on from a checkpoint of another with changed settings.

    Raises Conflict when the checkpoint cannot be used, Invalid when the config does not fit it."""
    if checkpoint.state in ("damaged", "removed"):
        raise Conflict(f"The checkpoint of step {checkpoint.step} is {checkpoint.state}; choose another.")
    origin = session.get_one(Run, checkpoint.run_id)
    problems = fork_problems(RunConfig.model_validate(origin.config), config, checkpoint)
    if problems:
        raise Invalid.of(problems)
    return create_run(
        session,
        actor,
        config,
        reward_hashes={**origin.reward_sources, **hashes},
        parent_run_id=origin.id,
        parent_checkpoint_id=checkpoint.id,
    )


def fork_problems(origin: RunConfig, config: RunConfig, checkpoint: Checkpoint) -> list[Problem]:
    """Why a config cannot go on from a checkpoint: another model, other stages before it, or no step left to do."""
    index, step = checkpoint.stage_index, checkpoint.step
    if config.model != origin.model:
        remedy = f"keep the model of run {origin.name!r}, whose weights the checkpoint holds"
        return [Problem("model", config.model.source, "is not the checkpoint's model", remedy)]
    kinds = [stage.kind for stage in config.stages[: index + 1]]
    expected = [stage.kind for stage in origin.stages[: index + 1]]
    if kinds != expected:
        remedy = f"begin with the stages {', '.join(expected)}; the checkpoint lies in the last of them"
        return [Problem("stages", ", ".join(kinds), "do not lead to the checkpoint", remedy)]
    steps = config.stages[index].num_steps
    if steps < step or (steps == step and index + 1 == len(config.stages)):
        remedy = f"raise it above {step}, or add a stage"
        return [Problem(f"stages.{index}.num_steps", str(steps), f"leaves nothing to do after step {step}", remedy)]
    return []


# ---------------------------------------------------------------- find
def get_run(session: Session, reference: str | int | uuid.UUID) -> Run:
    """By number or id. Raises NotFound."""
    run = None
    if isinstance(reference, int) or (isinstance(reference, str) and reference.isdecimal() and len(reference) < 10):
        run = session.scalar(select(Run).where(Run.number == int(reference)))
    else:
        try:
            run = session.get(Run, reference if isinstance(reference, uuid.UUID) else uuid.UUID(str(reference)))
        except ValueError:
            pass
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
    return [AttemptView(attempt, name) for attempt, name in rows.tuples()]


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
    return list(session.execute(ordered).tuples())


def newest_event(session: Session, run: Run, kind: str) -> JournalEvent | None:
    """The run's newest journal event of a type, such as `early_stopping`."""
    query = select(JournalEvent).join(Attempt, Attempt.id == JournalEvent.attempt_id)
    query = query.where(Attempt.run_id == run.id, JournalEvent.type == kind)
    return session.scalar(query.order_by(Attempt.number.desc(), JournalEvent.seq.desc()).limit(1))


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
    """Override early stopping (off, observe, stop); None returns to the config. Raises Conflict when the run has ended."""
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


# ---------------------------------------------------------------- delete
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
    by_attempt: Sequence[Any] = (Series, JournalEvent, RolloutBatch, EvaluationResult)
    for table in by_attempt:
        session.execute(delete(table).where(table.attempt_id.in_(attempts)))
    by_run: Sequence[Any] = (Checkpoint, FindingRow, Transition, Attempt)
    for table in by_run:
        session.execute(delete(table).where(table.run_id == run.id))
    session.execute(delete(Run).where(Run.id == run.id))
