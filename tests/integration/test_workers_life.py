"""A run's ordinary life on real workers: to its end, to its failure, paused, cancelled, moved."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator

import pytest
from sqlalchemy import select, update

from app.models import Checkpoint, Point, Run, Series, Worker
from tests.waiting import wait_until
from tests.worker_house import WorkerHouse

pytestmark = pytest.mark.xdist_group("life")

LONG = 100_000
"""Steps of a run that does not end by itself."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerHouse]:
    with WorkerHouse(tmp_path_factory.mktemp("life") / "home") as house:
        yield house


@pytest.fixture
def house(shared: WorkerHouse) -> WorkerHouse:
    shared.staff()
    return shared


def test_a_run_goes_from_the_queue_to_its_end(house: WorkerHouse) -> None:
    run = house.launch()

    (attempt,) = house.check(run, "completed")
    row = house.run_row(run)
    assert (row.reason, row.message, row.steps_done) == ("finished", "all steps were trained", 20)
    assert attempt.state == "finished"
    assert [row.source for row in house.history(run)] == ["queued", "starting", "running"]


def test_two_ranks_get_two_devices_and_end_together(house: WorkerHouse) -> None:
    run = house.launch(num_ranks=2)

    (attempt,) = house.check(run, "completed")
    assert len(attempt.devices) == 2


def test_a_failure_is_told_as_the_engine_told_it(house: WorkerHouse) -> None:
    run = house.launch(fail_at=3)

    (attempt,) = house.check(run, "failed")
    row = house.run_row(run)
    assert (row.reason, row.message, attempt.traceback) == ("non_finite", "the loss stayed NaN", "a\nb")


def test_a_segfault_ends_the_engine_and_never_the_worker(house: WorkerHouse) -> None:
    run = house.launch(crash_at=3)
    house.check(run, "failed")

    row = house.run_row(run)
    assert row.reason == "engine_crash"
    assert "killed by SIGSEGV" in (row.message or "")
    house.check(house.launch(5), "completed")
    assert all(process.poll() is None for process in house.workers.values())


def test_a_run_is_cancelled_before_a_worker_took_it(house: WorkerHouse) -> None:
    for name in house.workers:
        house.drain(name, True)
    run = house.launch()
    assert house.ask("cancel", run) == "cancelled"

    for name in house.workers:
        house.drain(name, False)
    assert house.check(run, "cancelled") == []


def test_a_run_is_cancelled_while_it_starts(house: WorkerHouse) -> None:
    run = house.launch(start_s=30)
    house.wait_for_state(run, "starting")
    assert house.ask("cancel", run) == "cancelling"

    (attempt,) = house.check(run, "cancelled")
    assert attempt.state == "stopped"


def test_a_run_is_cancelled_while_it_trains(house: WorkerHouse) -> None:
    run = house.launch(LONG)
    house.wait_for_step(run, 3)
    assert house.ask("cancel", run) == "cancelling"

    (attempt,) = house.check(run, "cancelled")
    assert (attempt.state, house.run_row(run).reason) == ("stopped", "cancelled")


def test_a_run_that_does_not_obey_is_killed_and_a_pause_can_become_a_cancel(house: WorkerHouse) -> None:
    run = house.launch(LONG, ignore_sigterm=True)
    house.wait_for_step(run, 3)
    assert house.ask("pause", run) == "pausing"
    assert house.ask("cancel", run) == "cancelling"

    house.check(run, "cancelled")


def test_a_finished_engine_that_lingers_is_killed_after_the_grace(house: WorkerHouse) -> None:
    house.check(house.launch(3, linger=True), "completed")


def test_a_pause_frees_the_device_and_the_run_resumes_on_another_worker(house: WorkerHouse) -> None:
    house.drain("two", True)
    first = house.launch(60, num_ranks=2)
    house.wait_for_step(first, 3)
    assert house.ask("pause", first) == "pausing"
    house.wait_for_state(first, "paused", seconds=15)
    second = house.launch(LONG, num_ranks=2)
    house.wait_for_step(second, 1, seconds=15)

    house.drain("two", False)
    assert house.ask("resume", first) == "queued"
    one, two = house.check(first, "completed")
    assert (one.state, one.devices, two.devices) == ("stopped", ["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"])
    assert two.repeated_steps == 0
    house.ask("cancel", second)
    (other,) = house.check(second, "cancelled")
    assert other.devices == one.devices


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_that_shuts_down_gives_its_run_back_and_another_goes_on(house: WorkerHouse, number: int) -> None:
    run = house.launch(60)
    house.wait_for_step(run, 7)
    name = house.worker_of(run)
    house.workers[name].send_signal(number)

    one, two = house.check(run, "completed")
    assert (one.state, one.reason, two.repeated_steps) == ("stopped", "worker_shutdown", 0)
    assert house.run_row(run).restarts == 0
    assert house.workers[name].wait(20) == 0
    with house.db.read() as session:
        assert session.get_one(Worker, one.worker_id).state == "offline"


def test_a_signal_from_elsewhere_queues_the_run_again_and_counts(house: WorkerHouse) -> None:
    run = house.launch(60)
    house.wait_for_step(run, 3)
    os.kill(house.engine_pids(run)[0], signal.SIGTERM)

    one, _ = house.check(run, "completed")
    assert (one.reason, house.run_row(run).restarts) == ("engine_stopped", 1)


def test_the_operators_early_stopping_reaches_the_engine(house: WorkerHouse) -> None:
    run = house.launch(LONG)
    house.wait_for_step(run, 1)
    attempt = house.attempt_row(run).id

    def has_heard(count: int) -> bool:
        heard = select(Point.step).join(Series).where(Series.attempt_id == attempt, Series.name == "messages")
        with house.db.read() as session:
            return session.scalar(heard.where(Point.value == count).limit(1)) is not None

    # At first it is told that nothing is overridden, so that a resumed engine forgets what no longer holds.
    for count, mode in ((2, "stop"), (3, None)):
        wait_until(lambda count=count: has_heard(count - 1), 20, "the engine heard what held before")
        with house.db.write() as session:
            session.execute(update(Run).where(Run.id == run).values(early_stopping_override=mode))
        wait_until(lambda count=count: has_heard(count), 20, f"the engine heard of {mode}")
    house.ask("cancel", run)
    house.check(run, "cancelled")


def test_a_damaged_checkpoint_is_marked_and_the_one_before_is_taken(house: WorkerHouse) -> None:
    run = house.launch(60)
    house.wait_for_step(run, 12)
    house.ask("pause", run)
    house.wait_for_state(run, "paused")
    newest, before = house.checkpoints(run)[:2]
    (house.settings.home / newest.path / "state.json").write_text('{"step": 99}')

    assert house.ask("resume", run) == "queued"
    house.wait_for_state(run, "completed")
    assert house.attempt_row(run).resumed_from_id == before.id
    assert house.attempt_row(run).repeated_steps == newest.step - before.step
    with house.db.read() as session:
        states = [session.get_one(Checkpoint, row.id).state for row in (newest, before)]
    assert states == ["damaged", "verified"]


def test_a_run_that_cannot_start_says_why(house: WorkerHouse) -> None:
    run: uuid.UUID = house.launch(send=False)
    with house.db.write() as session:
        session.execute(update(Run).where(Run.id == run).values(reward_sources={"brevity": "0" * 64}))
    house.send()

    house.check(run, "failed")
    row = house.run_row(run)
    assert row.reason == "invalid_config"
    assert "brevity@00000000: is not registered; register its source again" in (row.message or "")
