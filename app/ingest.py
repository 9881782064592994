"""From an attempt's journal into the database, each line exactly once.

Rows and cursor are written in one transaction, so whoever ships (supervisor, reaper, `cohort run import`), at any time
and at once with others, adds what is missing and nothing twice. It needs no token: the tail of a lost attempt counts.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from sqlalchemy import select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from app.db import Database
from app.models import (
    Attempt,
    Checkpoint,
    EvaluationResult,
    FindingRow,
    JournalEvent,
    Point,
    RolloutBatch,
    Run,
    SelfTestRow,
    Series,
    utc_now,
)
from app.runs.progress import progress, stage_index, steps_before, steps_of_stages
from app.settings import Settings
from grpo_engine import events
from grpo_engine.events import JOURNAL_NAME, AnyEvent, parse_line

PointKey = tuple[str, str, int]
"""Stage, metric, step."""
MAX_SHOWN_CHARACTERS = 500
MAX_NAME = 100
"""Characters of a self-test's name."""


def ingest_attempt(db: Database, attempt_id: uuid.UUID, folder: Path, *, max_events: int = 1000) -> int:
    """Store the next lines of the journal in `folder`; how many lines (0: all whole lines are stored)."""
    path = folder / JOURNAL_NAME
    with db.read() as session:
        run_id, offset = session.execute(
            select(Attempt.run_id, Attempt.cursor_offset).where(Attempt.id == attempt_id)
        ).one()
    if not path.exists() or path.stat().st_size <= offset:
        return 0
    with db.ingest() as session:
        run = session.get_one(Run, run_id, with_for_update=True)
        attempt = session.get_one(Attempt, attempt_id, with_for_update=True)
        lines = list(islice(_read_lines(path, attempt.cursor_seq, attempt.cursor_offset), max_events))
        if lines:
            _store(session, run, attempt, [event for event, _ in lines])
            attempt.cursor_seq, attempt.cursor_offset = lines[-1][0].seq, lines[-1][1]
        return len(lines)


def _read_lines(path: Path, seq: int, offset: int) -> Iterator[tuple[AnyEvent, int]]:
    """Whole lines after the cursor, each with the offset that follows it; one that is no event comes as a warning."""
    with open(path, "rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            seq += 1
            yield _parse(line, seq), offset


def _parse(line: bytes, seq: int) -> AnyEvent:
    try:
        event = parse_line(line)
    except ValidationError as error:
        problem = f"{error.errors()[0]['msg']} in {line.decode(errors='replace').strip()[:MAX_SHOWN_CHARACTERS]}"
    else:
        if event.seq == seq:
            return event
        problem = f"seq {event.seq} where {seq} was due"
    return events.WarningEvent(seq=seq, time=utc_now(), message=f"line {seq} of the journal is damaged: {problem}")


def _store(session: Session, run: Run, attempt: Attempt, journal: Sequence[AnyEvent]) -> None:
    _insert(session, JournalEvent, [_event_row(attempt, event) for event in journal if _is_kept(event)])
    _insert_points(session, attempt, journal)
    _store_rollouts(session, attempt, journal)
    _store_evaluations(session, attempt, journal)
    _store_self_tests(session, attempt, journal)
    _count_repeated_steps(session, attempt, journal)
    for event in journal:
        match event:
            case events.Started():
                attempt.first_step = steps_before(steps_of_stages(run.config), event.stage_index) + event.step
            case events.CheckpointSaved():
                _store_checkpoint(session, run, attempt, event)
            case events.CheckpointRemoved():
                _remove_checkpoint(session, attempt, event)
            case events.Finding():
                _store_finding(session, attempt, event)
            case _:
                continue
    attempt.last_event_at = journal[-1].time
    changes: dict[str, Any] = {"version": Run.version + 1}
    if attempt.number == run.num_attempts:
        changes |= progress(run.config, run.sparkline, journal)
    session.flush()
    session.execute(update(Run).where(Run.id == run.id).values(changes))


def _is_kept(event: AnyEvent) -> bool:
    return not isinstance(event, events.Metrics | events.Heartbeat)


def _event_row(attempt: Attempt, event: AnyEvent) -> dict[str, Any]:
    return {
        "attempt_id": attempt.id,
        "seq": event.seq,
        "time": event.time,
        "type": event.type,
        "stage": event.stage,
        "step": getattr(event, "step", None),
        "payload": event.model_dump(mode="json", exclude={"seq", "time", "type", "stage"}),
    }


def _insert(session: Session, table: Any, rows: Sequence[dict[str, Any]]) -> None:
    if rows:
        session.connection().execute(table.__table__.insert(), rows)


def _insert_points(session: Session, attempt: Attempt, journal: Sequence[AnyEvent]) -> None:
    """Points of metrics and evaluations; the later line wins where both tell the same metric of a step."""
    points: dict[PointKey, dict[str, Any]] = {}
    for event in journal:
        stage = event.stage or ""
        if isinstance(event, events.Metrics):
            for name, value in event.values.items():
                kind = event.nonfinite.get(name) if value is None else None
                points[stage, name, event.step] = {"value": value, "kind": kind, "time": event.time}
        elif isinstance(event, events.Evaluation):
            for name, value in event.metrics.items():
                points[stage, f"evaluation/{name}", event.step] = {"value": value, "kind": None, "time": event.time}
    if not points:
        return
    ids = _series_ids(session, attempt, points)
    rows = [{"series_id": ids[stage, name], "step": step, **rest} for (stage, name, step), rest in points.items()]
    insert: Any = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    statement = insert(Point.__table__)
    new = {name: statement.excluded[name] for name in ("value", "kind", "time")}
    upsert = statement.on_conflict_do_update(index_elements=["series_id", "step"], set_=new)
    session.connection().execute(upsert, rows)


def _series_ids(session: Session, attempt: Attempt, points: dict[PointKey, Any]) -> dict[tuple[str, str], int]:
    known = select(Series.stage, Series.name, Series.id).where(Series.attempt_id == attempt.id)
    ids = {(stage, name): number for stage, name, number in session.execute(known)}
    missing = dict.fromkeys((stage, name) for stage, name, _ in points if (stage, name) not in ids)
    if missing:
        _insert(session, Series, [{"attempt_id": attempt.id, "stage": stage, "name": name} for stage, name in missing])
        ids = {(stage, name): number for stage, name, number in session.execute(known)}
    return ids


def _store_rollouts(session: Session, attempt: Attempt, journal: Sequence[AnyEvent]) -> None:
    rows = [
        {
            "attempt_id": attempt.id,
            "batch": event.batch,
            "stage": event.stage or "",
            "path": artifact_key(attempt, event.path),
            "num_groups": event.num_groups,
            "num_completions": event.num_completions,
        }
        for event in journal
        if isinstance(event, events.Rollouts)
    ]
    _insert(session, RolloutBatch, rows)
    for event in journal:
        if isinstance(event, events.Trained) and event.batches:
            session.execute(
                update(RolloutBatch)
                .where(RolloutBatch.attempt_id == attempt.id, RolloutBatch.batch.in_(event.batches))
                .values(step=event.step)
            )


def artifact_key(attempt: Attempt, path: str) -> str:
    """Key of a file that the attempt's journal names relative to its directory."""
    return f"{Settings.attempt_key(attempt.run_id, attempt.number)}/{path}"


def _store_evaluations(session: Session, attempt: Attempt, journal: Sequence[AnyEvent]) -> None:
    rows = [
        {"attempt_id": attempt.id, "seq": event.seq, "stage": event.stage or "", "step": event.step}
        | event.model_dump(include={"benchmark", "num_prompts", "metrics"})
        for event in journal
        if isinstance(event, events.Evaluation)
    ]
    _insert(session, EvaluationResult, rows)


def _store_self_tests(session: Session, attempt: Attempt, journal: Sequence[AnyEvent]) -> None:
    rows = [
        {"attempt_id": attempt.id, "seq": event.seq, "stage": event.stage or "", "at": event.time}
        | {"name": event.name[:MAX_NAME], "passed": event.passed, "detail": event.detail}
        for event in journal
        if isinstance(event, events.SelfTest)
    ]
    _insert(session, SelfTestRow, rows)


def _store_checkpoint(session: Session, run: Run, attempt: Attempt, event: events.CheckpointSaved) -> None:
    stage = event.stage or "0-"
    ours = select(Checkpoint).where(Checkpoint.attempt_id == attempt.id)
    last = session.scalars(ours.order_by(Checkpoint.stage_index.desc(), Checkpoint.step.desc()).limit(1)).first()
    checkpoint = session.scalars(ours.where(Checkpoint.stage == stage, Checkpoint.step == event.step)).first()
    if checkpoint is None:
        parent = last.id if last is not None else attempt.resumed_from_id or run.parent_checkpoint_id
        checkpoint = Checkpoint(run_id=run.id, attempt_id=attempt.id, stage=stage, step=event.step, parent_id=parent)
        checkpoint.stage_index = stage_index(stage)
        session.add(checkpoint)
    checkpoint.path = artifact_key(attempt, event.path)
    checkpoint.bytes, checkpoint.sha256, checkpoint.metrics = event.bytes, event.sha256, dict(event.metrics)
    checkpoint.state, checkpoint.saved_at = "saved", event.time
    session.flush()


def _remove_checkpoint(session: Session, attempt: Attempt, event: events.CheckpointRemoved) -> None:
    key = artifact_key(attempt, event.path)
    statement = update(Checkpoint).where(Checkpoint.run_id == attempt.run_id, Checkpoint.path == key)
    session.execute(statement.values(state="removed"))


def _store_finding(session: Session, attempt: Attempt, event: events.Finding) -> None:
    if event.resolved:
        opened = (FindingRow.run_id == attempt.run_id, FindingRow.detector == event.detector)
        session.execute(update(FindingRow).where(*opened, FindingRow.state == "open").values(state="resolved"))
        return
    fields = event.model_dump(include={"step", "detector", "severity", "onset_step", "title", "evidence", "remedy"})
    session.add(
        FindingRow(
            run_id=attempt.run_id, attempt_id=attempt.id, seq=event.seq, stage=event.stage, at=event.time, **fields
        )
    )
    session.flush()


def _count_repeated_steps(session: Session, attempt: Attempt, journal: Sequence[AnyEvent]) -> None:
    """Steps that an earlier attempt had trained too, for this attempt and, when it tells late, for those after it."""
    new = {(event.stage, event.step) for event in journal if isinstance(event, events.Trained)}
    if not new:
        return
    siblings = session.scalars(select(Attempt).where(Attempt.run_id == attempt.run_id).order_by(Attempt.number)).all()
    if len(siblings) < 2:
        return
    seen: set[tuple[str | None, int | None]] = set()
    for sibling in siblings:
        trained = _trained_between(session, sibling, min(step for _, step in new), max(step for _, step in new)) & new
        if sibling.number == attempt.number:
            sibling.repeated_steps += len(new & seen)
            continue
        if sibling.number > attempt.number:
            sibling.repeated_steps += len(trained - seen)  # steps in `seen` were counted before
        seen |= trained


def _trained_between(session: Session, attempt: Attempt, first: int, last: int) -> set[tuple[str | None, int | None]]:
    """(stage, step) of what an attempt trained within these steps."""
    found = session.execute(
        select(JournalEvent.stage, JournalEvent.step).where(
            JournalEvent.attempt_id == attempt.id,
            JournalEvent.type == "trained",
            JournalEvent.step.between(first, last),
        )
    )
    return {(stage, step) for stage, step in found}
