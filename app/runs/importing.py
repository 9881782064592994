"""Runs made without the web: an attempt's directory becomes a run of its own, files copied, journal ingested."""

from __future__ import annotations

import secrets
import shutil
import uuid
from pathlib import Path

from pydantic import ValidationError
from sqlalchemy.orm import Session

from app.artifacts import open_store
from app.db import Database
from app.errors import Invalid
from app.ingest import ingest_attempt
from app.models import Attempt, Run, User
from app.rewards.service import custom_names, list_sources
from app.runs.launching import actor_name, new_run, record_start
from app.settings import Settings
from grpo_engine import events
from grpo_engine.config import RunConfig
from grpo_engine.config_errors import load_config
from grpo_engine.errors import Problem

COPIED = (events.JOURNAL_NAME, "engine.log", "config.json", "rollouts", "checkpoints")


def import_run(settings: Settings, database: Database, folder: Path, actor: User | None = None) -> Run:
    """Take in what `python -m grpo_engine run --out FOLDER` wrote. The folder itself is left as it is.

    Raises Invalid when it is not such a folder."""
    config, journal = _read(folder)
    run_id = uuid.uuid4()
    target = settings.attempt_folder(run_id, 1)
    try:
        _copy(folder, target)
        store = open_store(settings)
        if not store.is_local:
            store.upload(target, Settings.attempt_key(run_id, 1))
        with database.write() as session:
            attempt_id = _add_rows(session, run_id, config, journal, actor)
    except BaseException:
        shutil.rmtree(target.parents[1], ignore_errors=True)
        raise
    while ingest_attempt(database, attempt_id, target):
        pass
    with database.read() as session:
        return session.get_one(Run, run_id)


def _read(folder: Path) -> tuple[RunConfig, list[events.AnyEvent]]:
    try:
        config = load_config((folder / "config.json").read_text(), source="config.json")
        journal = events.read(folder)
    except (OSError, ValidationError) as error:
        raise _refused(folder, f"cannot be read: {error}") from error
    if not journal or not isinstance(journal[0], events.Started):
        raise _refused(folder, f"has no {events.JOURNAL_NAME} that begins with `started`")
    if journal[0].config_hash != config.hash():
        raise _refused(folder, "has a config.json that is not the one its journal was written with")
    return config, journal


def _refused(folder: Path, message: str) -> Invalid:
    remedy = "name the folder given to --out of `python -m grpo_engine run`"
    return Invalid.of([Problem("folder", str(folder)[:200], message, remedy)])


def _copy(folder: Path, target: Path) -> None:
    target.mkdir(parents=True)
    for name in COPIED:
        source = folder / name
        if source.is_symlink() or not source.exists():
            continue
        if source.is_dir():
            shutil.copytree(source, target / name, symlinks=True)
        else:
            shutil.copy2(source, target / name)


def _add_rows(
    session: Session, run_id: uuid.UUID, config: RunConfig, journal: list[events.AnyEvent], actor: User | None
) -> uuid.UUID:
    names = custom_names(config)
    known = {row.name: row for row in reversed(list_sources(session)) if row.name in names}
    run = new_run(session, config, known, owner=actor)
    started = journal[0]
    assert isinstance(started, events.Started)
    run.id, run.imported, run.num_attempts, run.git_commit = run_id, True, 1, started.git_commit
    run.started_at, run.ended_at = started.time, journal[-1].time
    run.state, attempt_state, run.reason, run.message = _end_of(journal)
    session.flush()
    attempt = Attempt(
        run_id=run_id,
        number=1,
        token=secrets.token_hex(16),
        state=attempt_state,
        reason=run.reason,
        message=run.message,
        traceback=next((event.traceback for event in journal if isinstance(event, events.Failed)), None),
        devices=[],
        started_at=run.started_at,
        ended_at=run.ended_at,
    )
    session.add(attempt)
    record_start(session, run, actor_name(actor), "imported")
    return attempt.id


def _end_of(journal: list[events.AnyEvent]) -> tuple[str, str, str, str]:
    """State of run and attempt, reason and sentence, by the journal's last terminal event."""
    for event in reversed(journal):
        match event:
            case events.Finished():
                return "completed", "finished", event.reason, event.message or "all steps were trained"
            case events.Failed():
                return "failed", "failed", event.reason, event.message
            case events.Stopped():
                message = f"the engine was stopped at step {event.step}; start a new run from its last checkpoint"
                return "cancelled", "stopped", "cancelled", message
            case _:
                continue
    message = "its journal ends without a last word; start a new run from its last checkpoint"
    return "failed", "lost", "engine_crash", message
