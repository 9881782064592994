"""Claiming: which run a worker takes, with which devices, and that nobody takes it twice."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from app.db import Database
from app.models import Attempt, Base, Run, Worker, utc_now
from tests.rows import CONFIG, add_run
from workers.claim import claim, fitting_devices


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    db = Database(f"sqlite:///{tmp_path / 'claim.db'}")
    Base.metadata.create_all(db.engine)
    yield db
    db.dispose()


@pytest.fixture
def worker(db: Database) -> uuid.UUID:
    fields: dict[str, Any] = {"host": "h", "boot_id": "b", "pid": 1, "process_started": 1, "versions": {}}
    with db.write() as session:
        row = Worker(id=uuid.uuid4(), name="w", state="online", labels=["a100"], devices=[], **fields)
        session.add(row)
    return row.id


def take(db: Database, worker: uuid.UUID, devices: Sequence[str] = ("cpu:0",)) -> Attempt | None:
    with db.write() as session:
        return claim(session, worker, devices, ["a100"])


def needing(**needs: Any) -> dict[str, Any]:
    return CONFIG | {"needs": CONFIG["needs"] | needs}


FITS = [
    ({}, ["cpu:0"], ["cpu:0"]),
    ({"num_ranks": 2}, ["cpu:0"], ["cpu:0"]),
    ({"num_ranks": 2}, [], None),
    ({"device": "cuda", "num_ranks": 2}, ["cuda:0"], None),
    ({"device": "cuda", "num_ranks": 2}, ["cuda:1", "cpu:0", "cuda:3", "cuda:4"], ["cuda:1", "cuda:3"]),
    ({"num_ranks": 2}, ["cpu:0", "cpu:1", "cpu:2"], ["cpu:0", "cpu:1"]),
    ({"device": "cuda"}, ["cpu:0"], None),
    ({"device": "cuda"}, ["cpu:0", "cuda:3"], ["cuda:3"]),
    ({"labels": ["a100"]}, ["cpu:0"], ["cpu:0"]),
    ({"labels": ["a100", "fast"]}, ["cpu:0"], None),
    ({}, [], None),
]


@pytest.mark.parametrize(("needs", "devices", "expected"), FITS)
def test_a_run_fits_by_kind_number_and_labels(needs: dict[str, Any], devices: list[str], expected: object) -> None:
    assert fitting_devices(needing(**needs)["needs"], devices, ["a100"]) == expected


def test_the_claim_makes_a_fresh_attempt_with_a_token(db: Database, worker: uuid.UUID) -> None:
    run = add_run(db)
    attempt = take(db, worker)

    assert attempt is not None
    assert (attempt.run_id, attempt.number, attempt.state, attempt.devices) == (run, 1, "starting", ["cpu:0"])
    assert (len(attempt.token), attempt.beats, attempt.pid is not None) == (32, 1, True)
    with db.read() as session:
        row = session.get_one(Run, run)
    assert (row.state, row.num_attempts, row.started_at is not None) == ("starting", 1, True)
    assert take(db, worker) is None


def test_priority_comes_before_waiting_time_and_misfits_are_passed_over(db: Database, worker: uuid.UUID) -> None:
    now = utc_now()
    late = add_run(db, queued_at=now)
    early = add_run(db, queued_at=now - timedelta(seconds=60))
    add_run(db, config=needing(device="cuda", num_ranks=8), priority=9)
    urgent = add_run(db, queued_at=now, priority=5)

    taken = [take(db, worker) for _ in range(4)]
    assert [attempt and attempt.run_id for attempt in taken] == [urgent, early, late, None]


def test_a_draining_or_forgotten_worker_takes_nothing(db: Database, worker: uuid.UUID) -> None:
    add_run(db)
    assert take(db, uuid.uuid4()) is None

    with db.write() as session:
        session.execute(update(Worker).values(drain=True))
    assert take(db, worker) is None


def test_of_many_claims_at_once_each_run_goes_to_one(db: Database, worker: uuid.UUID) -> None:
    runs = {add_run(db) for _ in range(3)}
    taken: list[Attempt | None] = []
    threads = [threading.Thread(target=lambda: taken.append(take(db, worker))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    attempts = [attempt for attempt in taken if attempt is not None]
    assert len(taken) == 8
    assert {attempt.run_id for attempt in attempts} == runs
    assert len(attempts) == len({attempt.token for attempt in attempts}) == 3
