"""Real workers, broker and database under SIGKILL, SIGSTOP, a wiped broker and a locked database.

Each test ends with the invariants of tests/invariants.py: the run's state is right, no two engines trained at once,
every journal line is in the database once, repeated steps lie after the last checkpoint and are marked.
"""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import func, select

from app.broker import ensure_broker
from app.models import Attempt
from grpo_engine.events import JOURNAL_NAME
from tests.waiting import wait_until
from tests.worker_house import WorkerHouse

pytestmark = pytest.mark.xdist_group("kills")

LONG = 100_000
"""Steps of a run that does not end by itself."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerHouse]:
    with WorkerHouse(tmp_path_factory.mktemp("kills") / "home") as house:
        yield house


@pytest.fixture
def house(shared: WorkerHouse) -> WorkerHouse:
    shared.staff()
    return shared


def kill(pid: int | None, number: int = signal.SIGKILL) -> None:
    assert pid is not None
    os.kill(pid, number)


def check_resumed(house: WorkerHouse, run: uuid.UUID) -> None:
    """Two attempts, the first lost, the second from its last checkpoint to the end."""
    one, two = house.check(run, "completed")
    assert (one.state, two.state, house.run_row(run).restarts) == ("lost", "finished", 1)
    assert two.first_step > 0


def test_the_celery_child_is_killed_and_even_a_careless_helper_of_its_engine_is_ended(house: WorkerHouse) -> None:
    run = house.launch(40, helper=True)
    house.wait_for_step(run, 7)
    kill(house.attempt_row(run).pid)

    check_resumed(house, run)


def test_the_celery_child_is_killed_before_its_engine_has_started(house: WorkerHouse) -> None:
    run = house.launch(start_s=30)
    house.wait_for_state(run, "starting")
    kill(house.attempt_row(run).pid)
    wait_until(lambda: house.run_row(run).num_attempts == 2, 20, "the run was taken again")

    house.ask("cancel", run)
    one, two = house.check(run, "cancelled")
    assert (one.state, two.state, house.run_row(run).restarts) == ("lost", "stopped", 1)


def test_the_workers_main_process_is_killed(house: WorkerHouse) -> None:
    run = house.launch(40)
    house.wait_for_step(run, 7)
    house.workers[house.worker_of(run)].kill()

    check_resumed(house, run)


def test_the_engine_is_killed(house: WorkerHouse) -> None:
    run = house.launch(40)
    house.wait_for_step(run, 7)
    kill(house.engine_pids(run)[0])

    (attempt,) = house.check(run, "failed")
    assert (attempt.state, attempt.reason) == ("failed", "engine_crash")
    assert "killed by SIGKILL" in (house.run_row(run).message or "")


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_of_two_is_killed(house: WorkerHouse, rank: int) -> None:
    run = house.launch(LONG, num_ranks=2)  # the stand-in's rank 0 would reach its end in the grace
    house.wait_for_step(run, 7)
    kill(house.engine_pids(run)[rank])

    (attempt,) = house.check(run, "failed")
    assert f"rank {rank} killed by SIGKILL" in (attempt.message or "")


def test_a_two_rank_engine_dies_with_its_supervisor_and_goes_on_elsewhere(house: WorkerHouse) -> None:
    run = house.launch(40, num_ranks=2)
    house.wait_for_step(run, 7)
    kill(house.attempt_row(run).pid)

    check_resumed(house, run)


def test_the_supervisor_is_killed_after_the_engine_finished(house: WorkerHouse) -> None:
    run = house.launch(5, linger=True)
    journal = house.settings.attempt_folder(run, 1) / JOURNAL_NAME
    wait_until(lambda: journal.exists() and '"finished"' in journal.read_text(), 20, "the engine finished")
    kill(house.attempt_row(run).pid)

    (attempt,) = house.check(run, "completed")
    assert attempt.state == "finished"


@contextmanager
def frozen(house: WorkerHouse, *pids: int | None) -> Iterator[None]:
    """SIGSTOP, and SIGCONT at the end. Not within a transaction: SQLite's write lock would freeze with its holder."""
    with sqlite_lock(house.settings.home / "cohort.db"):
        for pid in pids:
            kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            kill(pid, signal.SIGCONT)


@contextmanager
def sqlite_lock(path: Path) -> Iterator[None]:
    """Hold SQLite's write lock."""
    connection = sqlite3.connect(path, timeout=30, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        connection.execute("ROLLBACK")
        connection.close()


def test_a_frozen_worker_is_succeeded_and_never_trains_beside_its_successor(house: WorkerHouse) -> None:
    run = house.launch(60)
    house.wait_for_step(run, 7)
    with frozen(house, house.workers[house.worker_of(run)].pid, house.attempt_row(run).pid):
        house.wait_for_attempt(run, 2)
        commands = house.processes()
        old = {pid for pid in house.engine_pids(run) if "/attempts/1/" in commands[pid]}
        assert old, "the first engine waits at its deadline"

    wait_until(lambda: not old & set(house.engine_pids(run)), 20, "the first engine gave up")
    check_resumed(house, run)


def test_a_worker_frozen_for_less_than_the_loss_time_goes_on(house: WorkerHouse) -> None:
    run = house.launch(LONG)
    house.wait_for_step(run, 7)
    with frozen(house, house.attempt_row(run).pid):
        wait_until(lambda: engine_waits(house, run), 10, "the engine waits at its deadline")
        step = last_step(house, run)

    house.wait_for_step(run, step + 5)
    house.ask("cancel", run)
    (attempt,) = house.check(run, "cancelled")
    assert attempt.repeated_steps == 0


def last_step(house: WorkerHouse, run: uuid.UUID) -> int:
    """Steps in the journal of the run's first attempt."""
    return (house.settings.attempt_folder(run, 1) / JOURNAL_NAME).read_text().count('"trained"')


def engine_waits(house: WorkerHouse, run: uuid.UUID) -> bool:
    """No line was journaled for a third of a second, several steps' time."""
    journal = house.settings.attempt_folder(run, 1) / JOURNAL_NAME
    size = journal.stat().st_size
    threading.Event().wait(0.35)
    return journal.stat().st_size == size


def wipe_broker(house: WorkerHouse) -> None:
    assert house.broker.process is not None
    house.broker.process.kill()
    house.broker.process.wait()
    for path in (house.settings.home / "valkey").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    house.broker = ensure_broker(house.settings)


def test_the_broker_is_wiped_while_a_run_is_queued_and_while_it_runs(house: WorkerHouse) -> None:
    for name in house.workers:
        house.drain(name, True)
    run = house.launch(40)
    wipe_broker(house)
    for name in house.workers:
        house.drain(name, False)
    house.wait_for_step(run, 3)

    wipe_broker(house)
    (attempt,) = house.check(run, "completed")
    assert attempt.number == 1
    house.check(house.launch(3, send=False), "completed")


def test_a_hundred_messages_start_one_engine(house: WorkerHouse) -> None:
    run = house.launch(20, send=False)
    for _ in range(100):
        house.send()

    house.check(run, "completed")
    with house.db.read() as session:
        assert session.scalar(select(func.count()).where(Attempt.run_id == run)) == 1


def test_a_locked_database_holds_the_engine_at_its_deadline_and_ends_nothing(house: WorkerHouse) -> None:
    run = house.launch(LONG)
    house.wait_for_step(run, 7)
    with sqlite_lock(house.settings.home / "cohort.db"):
        wait_until(lambda: engine_waits(house, run), 10, "the engine waits at its deadline")
        step = last_step(house, run)

    house.wait_for_step(run, step + 5)
    house.ask("cancel", run)
    (attempt,) = house.check(run, "cancelled")
    assert attempt.number == 1


def test_with_the_default_times_an_engine_trains_on_through_a_database_locked_for_20_s(tmp_path: Path) -> None:
    with WorkerHouse(tmp_path / "home", quick=False) as house:
        house.staff()
        run = house.launch(LONG)
        house.wait_for_step(run, 3)
        before = last_step(house, run)
        with sqlite_lock(house.settings.home / "cohort.db"):
            threading.Event().wait(20)
        assert last_step(house, run) > before + 50
        house.wait_for_step(run, before + 50)

        kill(house.attempt_row(run).pid)
        house.wait_for_attempt(run, 2)
        house.ask("cancel", run)
        one, two = house.check(run, "cancelled")
        assert (one.state, two.state) == ("lost", "stopped")
