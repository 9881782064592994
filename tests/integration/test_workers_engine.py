"""The real engine under real workers: killed, frozen and paused, it goes on to its end and keeps the invariants."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine_configs import rl_stage, tiny_config
from tests.integration.test_workers_kills import engine_waits, frozen, kill, last_step, sqlite_lock, wipe_broker
from tests.waiting import wait_until
from tests.worker_house import WorkerHouse

START_S = 100
"""Importing torch on a busy machine."""


@pytest.mark.timeout(300)
def test_the_real_engine_is_killed_then_frozen_then_paused_and_trains_to_its_end(tmp_path: Path) -> None:
    stage = rl_stage(num_steps=150, checkpoint={"every_steps": 10}, evaluation={"every_steps": 1000, "num_prompts": 4})
    with WorkerHouse(tmp_path / "home", engine=None, stop_grace_s=15) as house:
        house.staff()
        run = house.launch_config(tiny_config(stage).model_dump(mode="json"))
        house.wait_for_step(run, 12, START_S)
        kill(house.attempt_row(run).pid)

        house.wait_for_attempt(run, 2, START_S)
        with frozen(house, house.workers[house.worker_of(run)].pid, house.attempt_row(run).pid):
            house.wait_for_attempt(run, 3, START_S)
        wait_until(lambda: len(house.engine_pids(run)) == 1, START_S, "the second engine gave up")

        house.ask("pause", run)
        house.wait_for_state(run, "paused", seconds=15)
        house.ask("resume", run)
        attempts = house.check(run, "completed", START_S)
        assert [attempt.state for attempt in attempts] == ["lost", "lost", "stopped", "finished"]
        row = house.run_row(run)
        assert (row.stage, row.steps_done, row.restarts, len(row.sparkline)) == ("0-rl", 150, 2, 60)


@pytest.mark.timeout(300)
def test_the_real_engine_trains_through_a_wiped_broker_a_hundred_messages_and_a_locked_database(tmp_path: Path) -> None:
    stage = rl_stage(num_steps=400, checkpoint={"every_steps": 50}, evaluation={"every_steps": 1000, "num_prompts": 4})
    with WorkerHouse(tmp_path / "home", engine=None, loss_s=10) as house:
        house.staff()
        for name in house.workers:
            house.drain(name, True)
        run = house.launch_config(tiny_config(stage).model_dump(mode="json"))
        wipe_broker(house)
        for name in house.workers:
            house.drain(name, False)
        for _ in range(100):
            house.send()
        house.wait_for_step(run, 10, START_S)
        wipe_broker(house)
        with sqlite_lock(house.settings.home / "cohort.db"):
            # Longer than a checkpoint takes, so that only the deadline explains the silence.
            wait_until(lambda: all(engine_waits(house, run) for _ in range(5)), 20, "the engine waits")
            step = last_step(house, run)
        assert step < 400
        house.wait_for_step(run, step + 5)
        (attempt,) = house.check(run, "completed", START_S)
        assert attempt.number == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_real_engine_goes_on_elsewhere_when_its_workers_main_process_is_killed(tmp_path: Path) -> None:
    stage = rl_stage(num_steps=60, checkpoint={"every_steps": 10}, evaluation={"every_steps": 1000, "num_prompts": 4})
    with WorkerHouse(tmp_path / "home", engine=None) as house:
        house.staff()
        run = house.launch_config(tiny_config(stage).model_dump(mode="json"))
        house.wait_for_step(run, 12, START_S)
        kill(house.workers[house.worker_of(run)].pid)
        one, two = house.check(run, "completed", START_S)
        assert (one.state, two.state) == ("lost", "finished")
        assert two.first_step >= 10


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_real_engine_that_is_killed_is_told_as_a_crash_and_its_worker_goes_on(tmp_path: Path) -> None:
    endless = tiny_config(rl_stage(num_steps=100_000)).model_dump(mode="json")
    with WorkerHouse(tmp_path / "home", engine=None) as house:
        house.staff()
        run = house.launch_config(endless)
        house.wait_for_step(run, 5, START_S)
        kill(house.engine_pids(run)[0])
        house.check(run, "failed")
        row = house.run_row(run)
        assert (row.reason, row.num_attempts) == ("engine_crash", 1)
        assert "SIGKILL" in str(row.message)
        short = tiny_config(rl_stage(num_steps=3)).model_dump(mode="json")
        house.check(house.launch_config(short), "completed", START_S)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_real_ranks_share_a_workers_cpu_and_a_killed_one_is_named(tmp_path: Path) -> None:
    needs = {"num_ranks": 2}
    with WorkerHouse(tmp_path / "home", engine=None) as house:
        house.start_scheduler()
        house.start_worker(devices="cpu:0")
        run = house.launch_config(tiny_config(rl_stage(num_steps=100_000), needs=needs).model_dump(mode="json"))
        house.wait_for_step(run, 3, START_S)
        kill(next(pid for pid in house.engine_pids(run) if b"RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()))
        house.check(run, "failed")
        row = house.run_row(run)
        assert row.reason == "engine_crash"
        assert "rank 1 ended without a word" in str(row.message)
        short = tiny_config(rl_stage(num_steps=3), needs=needs).model_dump(mode="json")
        (attempt,) = house.check(house.launch_config(short), "completed", START_S)
        assert attempt.devices == ["cpu:0"]
