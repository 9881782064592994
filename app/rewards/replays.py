"""Replays: a run's stored rollouts scored again by other rewards, one at a time, by a child process with a time limit.

The row is the truth. It is made queued, a thread of this web process takes it after the commit, and it ends completed
with its summary or failed with a sentence. replay_owners.py gives up those whose process has gone.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
import threading
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from app.artifacts import ArtifactStore
from app.db import Database
from app.errors import AppError, Invalid, NotFound
from app.limited import ask_engine, raise_problems
from app.liveness import ProcessIdentity
from app.models import Replay, Run, User, utc_now
from app.rewards import playground
from app.rollouts.batches import BatchView, batch_query, batch_view
from app.sessions import after_commit
from app.settings import Settings
from grpo_engine.config import RLStage
from grpo_engine.config_errors import load_config, read_yaml
from grpo_engine.errors import InvalidConfig, Problem
from grpo_engine.rollout_files import spread

logger = logging.getLogger(__name__)
MAX_BATCHES = 200
"""Scored of a stage; of more as many are taken, evenly spread."""
_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Job:
    """What the thread needs besides the row."""

    database: Database
    store: ArtifactStore
    settings: Settings


# ---------------------------------------------------------------- rows
def create(
    session: Session, job: Job, user: User, run: Run, given: Mapping[str, Any] | str, stage: str | None
) -> Replay:
    """A queued replay; it starts after the commit. `given`: a run config, or `rewards` with reward_clip and data, as a
    mapping or YAML. Raises Invalid for what cannot be scored again, NotFound without rollouts, Forbidden for custom
    parts without the permission `code`."""
    key = _stage_key(session, run, stage)
    config = read_config(given, key)
    playground.check_parts(session, user, config)
    worked_on_by = asdict(ProcessIdentity.own())
    row = Replay(run_id=run.id, owner_id=user.id, stage=key, config=config, **worked_on_by)
    session.add(row)
    session.flush()
    replay_id = row.id
    after_commit(session, lambda: start(job, replay_id))
    return row


def list_replays(session: Session, run: Run) -> list[Replay]:
    """Newest first."""
    query = select(Replay).where(Replay.run_id == run.id).order_by(Replay.created_at.desc(), Replay.id)
    return list(session.scalars(query))


def get_replay(session: Session, run: Run, replay_id: uuid.UUID) -> Replay:
    """Raises NotFound."""
    row = session.get(Replay, replay_id)
    if row is None or row.run_id != run.id:
        raise NotFound(f"Run {run.number} has no replay {replay_id}.")
    return row


# ---------------------------------------------------------------- config and rollouts
def read_config(given: Mapping[str, Any] | str, stage: str) -> dict[str, Any]:
    """The rewards to score with: of a run config those of the same stage, else of its only RL stage. Raises Invalid."""
    try:
        data = read_yaml(given, "the config") if isinstance(given, str) else given
        if not isinstance(data, Mapping) or "stages" not in data:
            return playground.rewards_of(data)
        stages = {f"{i}-{one.kind}": one for i, one in enumerate(load_config(data).stages) if isinstance(one, RLStage)}
    except InvalidConfig as error:
        raise Invalid.of(error.problems) from error
    chosen = stages.get(stage) or (next(iter(stages.values())) if len(stages) == 1 else None)
    if chosen is None:
        message = "which stage's rewards are meant is not clear"
        raise Invalid.of([Problem("stages", stage, message, "give only the rewards of one")])
    return playground.rewards_of_stage(chosen.model_dump(mode="json", exclude_none=True))


def _stage_key(session: Session, run: Run, stage: str | None) -> str:
    found = sorted({view.stage for view in _views(session, run)})
    if not found:
        raise NotFound(f"Run {run.number} has no rollouts that could be scored again.")
    if stage is None and len(found) == 1:
        return found[0]
    if stage not in found:
        message = "has no rollouts" if stage else "several stages have rollouts"
        raise Invalid.of([Problem("stage", stage or "", message, f"name one of {', '.join(found)}")])
    return stage


def _views(session: Session, run: Run) -> list[BatchView]:
    return [batch_view(row, number) for row, number in session.execute(batch_query(run))]


def batches(session: Session, run: Run, stage: str) -> list[BatchView]:
    """Of each batch the newest attempt's, at most MAX_BATCHES, evenly spread."""
    newest = {view.batch: view for view in _views(session, run) if view.stage == stage}
    return spread([newest[batch] for batch in sorted(newest)], MAX_BATCHES)


# ---------------------------------------------------------------- the work
def start(job: Job, replay_id: uuid.UUID) -> None:
    threading.Thread(target=work, args=(job, replay_id), daemon=True, name=f"replay {replay_id}").start()


def work(job: Job, replay_id: uuid.UUID) -> None:
    """Score and write the row's end. Never raises."""
    with _one_at_a_time:
        try:
            _finish(job, replay_id, state="completed", summary=_scored(job, replay_id))
        except AppError as error:
            _finish(job, replay_id, state="failed", message=error.detail)
        except Exception:
            logger.exception("replay %s failed", replay_id)
            _finish(job, replay_id, state="failed", message="The web application failed; its log says why.")


def _finish(job: Job, replay_id: uuid.UUID, **values: Any) -> None:
    with job.database.write() as session:
        session.execute(update(Replay).where(Replay.id == replay_id).values(**values, ended_at=utc_now()))


def _scored(job: Job, replay_id: uuid.UUID) -> dict[str, Any]:
    with job.database.write() as session:
        row = session.get_one(Replay, replay_id)
        row.state = "running"
        run = session.get_one(Run, row.run_id)
        views, config, stage = batches(session, run, row.stage), row.config, row.stage
        owner = session.get_one(User, row.owner_id)
        sources = playground.check_parts(session, owner, config)
    with tempfile.TemporaryDirectory(prefix="cohort-replay-") as name:
        arguments = _arguments(Path(name), job.store, views, config, sources, stage, job.settings.replay_limit_s)
        advice = "score fewer parts, or use the command line"
        summary = ask_engine(arguments, Path(name), job.settings.replay_limit_s, doing="It", advice=advice)
    raise_problems(summary)
    attempts = {view.batch: view.attempt for view in views}
    for example in summary["examples"]:
        example["attempt"] = attempts.get(example["batch"])
    return summary


def _arguments(
    folder: Path,
    store: ArtifactStore,
    views: list[BatchView],
    config: Mapping[str, Any],
    sources: Mapping[str, str],
    stage: str,
    limit_s: float,
) -> list[str]:
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    paths = [str(_local_file(folder, store, view)) for view in views]
    arguments = ["replay", *paths, "--config", str(folder / "config.yaml"), "--out", str(folder / "result")]
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
        arguments += ["--reward", f"{name}={folder / name}.py"]
    # One scoring process: the web host has others to serve. The child ends itself should this application be gone.
    return [*arguments, "--stage", stage, "--processes", "1", "--limit-s", str(int(limit_s) + 5)]


def _local_file(folder: Path, store: ArtifactStore, view: BatchView) -> Path:
    """Where the batch lies on this host; fetched first from a remote store. Raises NotFound."""
    local = store.local_path(view.key)
    if local is not None:
        return local
    path = folder / f"batch-{view.batch:06d}.parquet"
    with store.open(view.key) as source, open(path, "wb") as target:
        shutil.copyfileobj(source, target)
    return path
