"""What an engine needs on disk before it starts: its directory, config, rewards and a checkpoint that was verified."""

from __future__ import annotations

import json
import logging
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, select, update

from app.db import Database
from app.models import Attempt, Checkpoint, RewardSource, Run, utc_now
from app.settings import Settings
from grpo_engine.errors import CheckpointInvalid, InvalidConfig, Problem
from grpo_engine.events import JOURNAL_NAME
from grpo_engine.manifest import manifest_sha256, verify

log = logging.getLogger("cohort.worker")


@dataclass(frozen=True, slots=True)
class Prepared:
    folder: Path
    argv: list[str]
    num_ranks: int
    resumed_from: uuid.UUID | None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint the run could continue from."""

    id: uuid.UUID
    folder: Path
    sha256: str


def prepare(db: Database, settings: Settings, attempt: Attempt) -> Prepared:
    """Fill the attempt's directory and say how to start its ranks.

    Raises InvalidConfig when a reward's source is not registered, CheckpointInvalid when none of the run's checkpoints,
    or the one it was forked from, can be used, OSError when the directory cannot be written.
    """
    with db.read() as session:
        run = session.get_one(Run, attempt.run_id)
    folder = settings.attempt_folder(run.id, attempt.number)
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / JOURNAL_NAME).exists():
        raise FileExistsError(f"{folder} already holds an attempt; attempts never overwrite each other")
    config_path = folder / "config.json"
    config_path.write_text(json.dumps(run.config, indent=2, ensure_ascii=False))
    argv = list(settings.engine_command) or [sys.executable, "-m", "grpo_engine", "rank"]
    argv += ["--config", str(config_path), "--out", str(folder)]
    start = find_checkpoint(db, settings, run.id)
    if start is not None:
        argv += ["--resume", str(start.folder)]
    elif run.parent_checkpoint_id is not None:
        start = _parent(db, settings, run.parent_checkpoint_id)
        argv += ["--fork", str(start.folder)]
    for name, file in _write_rewards(db, run.reward_sources, folder).items():
        argv += ["--reward", f"{name}={file}"]
    return Prepared(folder, argv, int(run.needs.get("num_ranks", 1)), start.id if start else None)


def find_checkpoint(db: Database, settings: Settings, run_id: uuid.UUID) -> Candidate | None:
    """The run's newest checkpoint whose bytes are what was written; damaged ones are marked and passed over.

    None when it has none yet. Raises CheckpointInvalid when it has some and none can be used: training everything
    again is for a person to decide."""
    problem = None
    for candidate in _candidates(db, settings, Checkpoint.run_id == run_id, Checkpoint.state != "removed"):
        problem = _use(db, candidate)
        if problem is None:
            return candidate
        log.warning("checkpoint %s cannot be used (%s); taking the one before", candidate.folder, problem)
    if problem is not None:
        raise CheckpointInvalid(f"no checkpoint of this run can be used ({problem}); clone the run to train it anew")
    return None


def _parent(db: Database, settings: Settings, checkpoint_id: uuid.UUID) -> Candidate:
    """The checkpoint a run was forked from; training from the beginning instead would be another run."""
    candidates = _candidates(db, settings, Checkpoint.id == checkpoint_id)
    problem = _use(db, candidates[0]) if candidates else "it was deleted with its run"
    if problem is not None:
        raise CheckpointInvalid(f"the checkpoint this run was forked from cannot be used: {problem}")
    return candidates[0]


def _use(db: Database, candidate: Candidate) -> str | None:
    """Read every byte and note the verdict; why the checkpoint cannot be used, None when it can."""
    if not candidate.folder.exists():
        return f"{candidate.folder} is not on this host"
    problem = _problem_of(candidate)
    _mark(db, candidate.id, "damaged" if problem else "verified")
    return problem


def _candidates(db: Database, settings: Settings, *conditions: ColumnElement[bool]) -> list[Candidate]:
    statement = (
        select(Checkpoint.id, Checkpoint.path, Checkpoint.sha256)
        .join(Attempt, Attempt.id == Checkpoint.attempt_id)
        .where(*conditions)
        .order_by(Checkpoint.stage_index.desc(), Checkpoint.step.desc(), Attempt.number.desc())
    )
    with db.read() as session:
        found = session.execute(statement).all()
    return [Candidate(number, settings.home.resolve() / path, sha256) for number, path, sha256 in found]


def _problem_of(candidate: Candidate) -> str | None:
    try:
        verify(candidate.folder)
        if manifest_sha256(candidate.folder) != candidate.sha256:
            return "its manifest is not the one that was journaled"
    except (CheckpointInvalid, OSError) as error:
        return str(error)
    return None


def _mark(db: Database, checkpoint_id: uuid.UUID, state: str) -> None:
    with db.write() as session:
        statement = update(Checkpoint).where(Checkpoint.id == checkpoint_id, Checkpoint.state != "removed")
        session.execute(statement.values(state=state, verified_at=utc_now()))


def _write_rewards(db: Database, sources: dict[str, Any], folder: Path) -> dict[str, Path]:
    """Name -> file of each custom reward, as registered when the run was launched."""
    files: dict[str, Path] = {}
    for name, digest in sources.items():
        with db.read() as session:
            statement = select(RewardSource.source).where(RewardSource.name == name, RewardSource.hash == digest)
            source = session.scalar(statement)
        if source is None:
            problem = Problem("rewards", f"{name}@{digest[:8]}", "is not registered", "register its source again")
            raise InvalidConfig([problem])
        files[name] = folder / "rewards" / f"{name}.py"
        files[name].parent.mkdir(exist_ok=True)
        files[name].write_text(source)
    return files
