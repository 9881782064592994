"""A run forked from a checkpoint goes on from it, and never starts from the beginning instead."""

from __future__ import annotations

import shutil

import pytest
from sqlalchemy import select

from app.db import Database
from app.models import Attempt, Checkpoint
from app.runs.service import fork_from_checkpoint
from app.settings import Settings
from app.users.service import ensure_first_user
from grpo_engine.config_errors import load_config
from grpo_engine.errors import CheckpointInvalid
from tests import seed
from workers.claim import claim
from workers.prepare import find_checkpoint, prepare


def newest_checkpoint(database: Database) -> Checkpoint:
    newest = select(Checkpoint).where(Checkpoint.state != "removed").order_by(Checkpoint.step.desc()).limit(1)
    with database.read() as session:
        return session.scalars(newest).one()


def claimed_fork(database: Database, settings: Settings) -> Attempt:
    """The attempt of a run forked from a finished run's last checkpoint with twice its steps."""
    origin = seed.finished_run(database, settings)
    stages = [origin.config["stages"][0], origin.config["stages"][1] | {"num_steps": 2 * seed.RL_STEPS}]
    config = load_config(origin.config | {"stages": stages})
    worker = seed.worker(database, "forks")
    with database.write() as session:
        fork_from_checkpoint(session, ensure_first_user(session), newest_checkpoint(database), config)
    with database.write() as session:
        attempt = claim(session, worker.id, ["cpu:0"], [])
    assert attempt is not None
    return attempt


def test_a_forked_run_is_started_from_its_parents_checkpoint(database: Database, settings: Settings) -> None:
    attempt = claimed_fork(database, settings)
    prepared = prepare(database, settings, attempt)
    parent = newest_checkpoint(database)
    folder = settings.home.resolve() / parent.path
    assert prepared.argv[prepared.argv.index("--fork") + 1] == str(folder)
    assert "--resume" not in prepared.argv
    assert prepared.resumed_from == parent.id


def test_a_fork_whose_checkpoint_has_gone_fails_instead_of_training_anew(
    database: Database, settings: Settings
) -> None:
    attempt = claimed_fork(database, settings)
    shutil.rmtree(settings.home.resolve() / newest_checkpoint(database).path)
    with pytest.raises(CheckpointInvalid, match="forked from cannot be used"):
        prepare(database, settings, attempt)


def test_a_run_whose_checkpoints_are_all_damaged_is_not_trained_anew_unasked(
    database: Database, settings: Settings
) -> None:
    run = seed.running_run(database, settings)
    for path in (settings.home.resolve() / "runs" / str(run.id)).glob("attempts/*/checkpoints/*/manifest.json"):
        path.write_text("{}")
    with pytest.raises(CheckpointInvalid, match="no checkpoint of this run can be used"):
        find_checkpoint(database, settings, run.id)
