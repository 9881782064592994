"""Replays whose web process has gone are given up; those of others that live are left alone."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import update

from app.liveness import ProcessIdentity, boot_id, start_ticks
from app.models import Replay
from app.rewards.replay_owners import LOST, ReplayKeeper
from app.runs.service import get_run
from app.users.service import ensure_first_user
from tests.callers import bearer

ELSEWHERE = {"boot_id": str(uuid.uuid4()), "pid": 1, "process_started": 1}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def other() -> Iterator[dict[str, Any]]:
    """Another living process of this host."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        with closing(process.stdin):
            started = start_ticks(process.pid)
            yield {"boot_id": boot_id(), "pid": process.pid, "process_started": started}


def made(app: FastAPI, *owners: dict[str, Any]) -> list[uuid.UUID]:
    with app.state.database.write() as session:
        run, user = get_run(session, 1), ensure_first_user(session)
        kept = {"run_id": run.id, "owner_id": user.id, "stage": "1-rl", "config": {"rewards": []}, "state": "running"}
        rows = [Replay(**kept, **owner) for owner in owners]
        session.add_all(rows)
        session.flush()
        return [row.id for row in rows]


def found(app: FastAPI, ids: list[uuid.UUID]) -> list[tuple[str, str, int]]:
    with app.state.database.read() as session:
        rows = [session.get_one(Replay, replay_id) for replay_id in ids]
        return [(row.state, row.message, row.beats) for row in rows]


def test_a_start_gives_up_only_what_nobody_works_on(seeded_app: FastAPI, other: dict[str, Any]) -> None:
    gone = other | {"process_started": 1}
    ids = made(seeded_app, other, gone, {}, ELSEWHERE)
    with TestClient(seeded_app, headers=bearer(seeded_app)) as client:
        told = client.get(f"/api/v1/runs/1/replays/{ids[1]}").json()
    assert (told["state"], told["message"], told["ended_at"] is None) == ("failed", LOST, False)
    assert [state for state, _, _ in found(seeded_app, ids)] == ["running", "failed", "failed", "running"]


def test_a_process_beats_for_its_own_replays(seeded_app: FastAPI) -> None:
    ids = made(seeded_app, asdict(ProcessIdentity.own()))
    clock = Clock()
    keeper = ReplayKeeper(seeded_app.state.database, seeded_app.state.settings, clock)
    for _ in range(3):
        keeper.round()
        clock.now += 1000.0
    assert found(seeded_app, ids) == [("running", "", 3)]


def test_a_process_elsewhere_is_gone_when_its_beats_stand_still(seeded_app: FastAPI, other: dict[str, Any]) -> None:
    still, moving, frozen = ids = made(seeded_app, ELSEWHERE, ELSEWHERE, other)
    clock, database = Clock(), seeded_app.state.database
    keeper = ReplayKeeper(database, seeded_app.state.settings, clock)
    for now, state in ((0.0, "running"), (59.0, "running"), (60.0, "failed")):
        clock.now = now
        keeper.round()
        assert [found(seeded_app, [one])[0][0] for one in ids] == [state, "running", state]
        with database.write() as session:
            session.execute(update(Replay).where(Replay.id == moving).values(beats=Replay.beats + 1))
    assert found(seeded_app, [still])[0][1] == LOST
    assert found(seeded_app, [frozen])[0][1] == LOST
