"""The reaper: counters on its own clock, processes of its own host, tails of journals, and what it never touches."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from app.db import Database
from app.liveness import ProcessIdentity, exists
from app.models import Attempt, Base, Run, Worker
from app.settings import Settings
from grpo_engine.events import Journal
from tests.rows import add_attempt, add_run
from workers.reaper import Reaper
from workers.scheduler import call_workers

ELSEWHERE: dict[str, Any] = {"boot_id": "another host", "pid": 1, "process_started": 1}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Scene:
    """A database, a home and a reaper with a clock of its own."""

    def __init__(self, home: Path) -> None:
        self.settings = Settings(home=home)
        self.db = Database(self.settings.resolved_database_url)
        Base.metadata.create_all(self.db.engine)
        self.clock = Clock()
        self.reaper = Reaper(self.db, self.settings, self.clock)

    def round_after(self, seconds: float) -> None:
        self.clock.now += seconds
        self.reaper.round()

    def beat(self) -> None:
        with self.db.write() as session:
            session.execute(update(Attempt).values(beats=Attempt.beats + 1))

    def states(self, attempt: uuid.UUID) -> tuple[str, str]:
        with self.db.read() as session:
            row = session.get_one(Attempt, attempt)
            return row.state, session.get_one(Run, row.run_id).state

    def journal(self, attempt: uuid.UUID) -> Journal:
        with self.db.read() as session:
            row = session.get_one(Attempt, attempt)
        return Journal(self.settings.attempt_folder(row.run_id, row.number))


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.db.dispose()


def ended_process() -> dict[str, Any]:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    own = ProcessIdentity.own()
    return {"boot_id": own.boot_id, "pid": process.pid, "process_started": own.process_started}


def test_silence_is_counted_from_the_reapers_own_start(scene: Scene) -> None:
    attempt = add_attempt(scene.db, add_run(scene.db, "running"), **ELSEWHERE)
    scene.round_after(0)
    scene.round_after(59)
    assert scene.states(attempt) == ("running", "running")

    scene.round_after(1)
    assert scene.states(attempt) == ("lost", "queued")


def test_a_beat_begins_the_count_anew(scene: Scene) -> None:
    attempt = add_attempt(scene.db, add_run(scene.db, "running"), **ELSEWHERE)
    scene.round_after(0)
    scene.round_after(59)
    scene.beat()
    scene.round_after(59)
    scene.round_after(59)
    assert scene.states(attempt) == ("running", "running")


def test_a_database_outage_begins_the_count_anew(scene: Scene) -> None:
    attempt = add_attempt(scene.db, add_run(scene.db, "running"), **ELSEWHERE)
    scene.round_after(0)
    scene.reaper.forget()
    scene.round_after(60)
    assert scene.states(attempt) == ("running", "running")


def test_on_its_own_host_a_gone_process_is_seen_at_once_and_a_living_one_is_not_taken_for_it(scene: Scene) -> None:
    gone = add_attempt(scene.db, add_run(scene.db, "running"), **ended_process())
    own = ProcessIdentity.own()
    reused: dict[str, Any] = {"boot_id": own.boot_id, "pid": own.pid, "process_started": own.process_started - 1}
    other = add_attempt(scene.db, add_run(scene.db, "running"), **reused)
    alive = add_attempt(scene.db, add_run(scene.db, "running"), **(reused | {"process_started": own.process_started}))
    scene.round_after(0)

    assert scene.states(gone) == scene.states(other) == ("lost", "queued")
    assert scene.states(alive) == ("running", "running")


@pytest.mark.parametrize(("before", "after"), [("cancelling", "cancelled"), ("pausing", "paused")])
def test_what_the_operator_asked_for_is_kept(scene: Scene, before: str, after: str) -> None:
    attempt = add_attempt(scene.db, add_run(scene.db, before), "stopping", **ended_process())
    scene.round_after(0)

    assert scene.states(attempt) == ("lost", after)


def test_the_tail_of_a_lost_attempt_is_taken_in_before_its_run_goes_on(scene: Scene) -> None:
    attempt = add_attempt(scene.db, add_run(scene.db, "running"), **ended_process())
    journal = scene.journal(attempt)
    journal.append("trained", stage="1-rl", step=4, started_boot_s=1, ended_boot_s=2)
    journal.close()
    scene.round_after(0)

    with scene.db.read() as session:
        row = session.get_one(Attempt, attempt)
        assert (row.state, row.cursor_seq, session.get_one(Run, row.run_id).step) == ("lost", 1, 4)


@pytest.mark.parametrize(
    ("event", "states"),
    [
        ({"type": "finished", "reason": "finished"}, ("finished", "completed")),
        ({"type": "failed", "reason": "data_error", "message": "m"}, ("failed", "failed")),
        ({"type": "stopped", "step": 3}, ("lost", "queued")),
    ],
)
def test_an_engine_that_had_ended_by_itself_is_believed(scene: Scene, event: Any, states: Any) -> None:
    attempt = add_attempt(scene.db, add_run(scene.db, "running"), **ended_process())
    journal = scene.journal(attempt)
    journal.append(**event)
    journal.close()
    scene.round_after(0)

    assert scene.states(attempt) == states


def test_a_journal_that_cannot_be_stored_keeps_nobody_from_being_watched(scene: Scene) -> None:
    attempts = [add_attempt(scene.db, add_run(scene.db, "running"), **ended_process()) for _ in range(2)]
    journal = scene.journal(attempts[0])
    journal.append("trained", stage="not a stage", step=4, started_boot_s=1, ended_boot_s=2)
    journal.close()
    scene.round_after(0)

    assert [scene.states(attempt) for attempt in attempts] == [("lost", "queued")] * 2


def test_lines_that_come_after_the_end_are_taken_in_too(scene: Scene) -> None:
    attempt = add_attempt(scene.db, add_run(scene.db, "running"), **ELSEWHERE)
    scene.round_after(0)
    scene.round_after(60)
    journal = scene.journal(attempt)
    journal.append("warning", message="late")
    journal.close()
    scene.round_after(5)

    with scene.db.read() as session:
        assert session.get_one(Attempt, attempt).cursor_seq == 1


def test_a_new_reaper_takes_in_what_ended_before_it_started(scene: Scene) -> None:
    attempt = add_attempt(scene.db, add_run(scene.db, "failed"), "failed")
    journal = scene.journal(attempt)
    journal.append("warning", message="left over")
    journal.close()
    scene.round_after(0)

    with scene.db.read() as session:
        assert session.get_one(Attempt, attempt).cursor_seq == 1
    assert scene.states(attempt) == ("failed", "failed")


def add_worker(db: Database, **fields: Any) -> uuid.UUID:
    device = {"id": "cpu:0", "kind": "cpu", "name": "", "memory_bytes": 0}
    values: dict[str, Any] = {"name": "w", "host": "h", "state": "online", "labels": [], "devices": [device]}
    with db.write() as session:
        worker = Worker(id=uuid.uuid4(), versions={}, **(values | ELSEWHERE | fields))
        session.add(worker)
    return worker.id


def test_a_worker_that_stands_still_or_has_gone_is_lost(scene: Scene) -> None:
    silent, gone = add_worker(scene.db), add_worker(scene.db, **ended_process())
    scene.round_after(0)
    with scene.db.read() as session:
        assert [session.get_one(Worker, worker).state for worker in (silent, gone)] == ["online", "lost"]

    scene.round_after(60)
    with scene.db.read() as session:
        assert session.get_one(Worker, silent).state == "lost"


def test_nobody_is_called_for_a_run_that_fits_nobody(scene: Scene) -> None:
    add_worker(scene.db)
    assert call_workers(scene.db, scene.settings) == 0
    add_run(scene.db, needs={"device": "cuda", "num_ranks": 1, "labels": []})

    assert call_workers(scene.db, scene.settings) == 0


def test_a_process_is_told_from_a_later_one_with_its_number() -> None:
    own = ProcessIdentity.own()

    assert exists(os.getpid(), own.process_started)
    assert not exists(os.getpid(), own.process_started + 1)
