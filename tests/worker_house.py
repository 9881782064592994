"""Real worker and scheduler processes on a real broker and database, for tests that kill them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sqlalchemy import select, update

from app.broker import Broker, die_with_parent, ensure_broker, send_work, stop_broker
from app.db import Database
from app.models import Attempt, Base, Checkpoint, Run, Transition, Worker
from app.runs import states
from app.settings import Settings
from tests.invariants import check_run, processes_of
from tests.rows import add_run
from tests.waiting import wait_until

STEPPER = Path(__file__).parent / "engines" / "stepper.py"
QUICK = {"beat_s": 0.3, "deadline_s": 1.2, "loss_s": 2.5, "reap_s": 0.3, "ship_s": 0.1, "stop_grace_s": 2}
PATIENCE_S = 40


class WorkerHouse:
    """Use as a context manager; at its end no process of it may be left."""

    def __init__(
        self,
        home: Path,
        *,
        quick: bool = True,
        engine: Path | None = STEPPER,
        database_url: str = "",
        **changes: float,
    ) -> None:
        """`engine` None: the real one. `database_url` empty: SQLite. `changes` of the settings' times."""
        command = [sys.executable, str(engine)] if engine else []
        timing: dict[str, Any] = (QUICK if quick else {}) | changes
        self.settings = Settings(home=home, database_url=database_url, engine_command=command, **timing)
        self._environment = {f"COHORT_{name.upper()}": str(value) for name, value in timing.items()}
        self._environment |= {"COHORT_HOME": str(home), "COHORT_ENGINE_COMMAND": json.dumps(command)}
        self._environment |= {"COHORT_DATABASE_URL": database_url}
        self._environment |= {"PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
        self._processes: list[subprocess.Popen[bytes]] = []
        self.workers: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        self.settings.home.mkdir(exist_ok=True)
        self.db = Database(self.settings.resolved_database_url)
        Base.metadata.create_all(self.db.engine)
        self.broker: Broker = ensure_broker(self.settings)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.db.dispose()
        stop_broker(self.settings, self.broker)
        left = self.processes()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert error is not None or not left, f"left behind: {left}"

    # ------------------------------------------------------------ processes
    def start(self, module: str, **environment: str) -> subprocess.Popen[bytes]:
        with open(self.settings.home / f"{module}.log", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module],
                env=os.environ | self._environment | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent(signal.SIGKILL),
            )
        self._processes.append(process)
        return process

    def start_worker(self, name: str = "one", devices: str = "cpu:0", **environment: str) -> subprocess.Popen[bytes]:
        named = {"COHORT_WORKER_NAME": name, "COHORT_WORKER_DEVICES": devices}
        self.workers[name] = self.start("workers", **(named | environment))
        return self.workers[name]

    def staff(self) -> None:
        """A scheduler and two workers of two devices each; those that a test killed are started again."""
        for name, devices in (("one", "cpu:0,cpu:1"), ("two", "cpu:2,cpu:3")):
            if name not in self.workers or self.workers[name].poll() is not None:
                self.start_worker(name, devices)
        if not any(process.args[-1] == "workers.scheduler" for process in self._processes):  # type: ignore[index]
            self.start_scheduler()

    def worker_of(self, run: uuid.UUID) -> str:
        """Name of the worker that has the run's newest attempt."""
        with self.db.read() as session:
            return session.get_one(Worker, self.attempt_row(run).worker_id).name

    def drain(self, name: str, drain: bool) -> None:
        with self.db.write() as session:
            session.execute(update(Worker).where(Worker.name == name).values(drain=drain))

    def start_scheduler(self) -> subprocess.Popen[bytes]:
        return self.start("workers.scheduler")

    def processes(self) -> dict[int, str]:
        broker = self.broker.process.pid if self.broker.process else 0
        return {pid: command for pid, command in processes_of(self.settings.home).items() if pid != broker}

    def engine_pids(self, run: uuid.UUID) -> list[int]:
        """Rank by rank."""
        return sorted(pid for pid, command in self.processes().items() if f"runs/{run}/" in command)

    # ------------------------------------------------------------ runs
    def launch(self, num_steps: int = 20, *, num_ranks: int = 1, send: bool = True, **stand_in: Any) -> uuid.UUID:
        config: Mapping[str, Any] = {
            "stages": [{"kind": "rl", "num_steps": num_steps}],
            "needs": {"device": "cpu", "num_ranks": num_ranks, "labels": []},
            "stand_in": stand_in,
        }
        return self.launch_config(config, send=send)

    def launch_config(self, config: Mapping[str, Any], *, send: bool = True) -> uuid.UUID:
        run = add_run(self.db, config=config)
        if send:
            self.send()
        return run

    def run_row(self, run: uuid.UUID) -> Run:
        with self.db.read() as session:
            return session.get_one(Run, run)

    def attempt_row(self, run: uuid.UUID) -> Attempt:
        """The newest attempt."""
        newest = select(Attempt).where(Attempt.run_id == run).order_by(Attempt.number.desc()).limit(1)
        with self.db.read() as session:
            return session.scalars(newest).one()

    def wait_for_state(self, run: uuid.UUID, *wanted: str, seconds: float = PATIENCE_S) -> None:
        wait_until(lambda: self.run_row(run).state in wanted, seconds, f"run is {' or '.join(wanted)}")

    def wait_for_step(self, run: uuid.UUID, step: int, seconds: float = PATIENCE_S) -> None:
        wait_until(lambda: self.run_row(run).step >= step, seconds, f"step {step} is in the database")

    def wait_for_attempt(self, run: uuid.UUID, number: int, seconds: float = PATIENCE_S) -> None:
        def begun() -> bool:
            row = self.run_row(run)
            return row.num_attempts >= number and row.state == "running"

        wait_until(begun, seconds, f"attempt {number} runs")

    def ask(self, intent: str, run: uuid.UUID) -> str | None:
        """cancel, pause or resume, as the web application does it."""
        with self.db.write() as session:
            state: str | None = getattr(states, f"request_{intent}")(session, run, actor="ann")
        send_work(self.settings)
        return state

    def send(self) -> None:
        send_work(self.settings)

    def history(self, run: uuid.UUID) -> list[Transition]:
        with self.db.read() as session:
            return list(session.scalars(select(Transition).where(Transition.run_id == run).order_by(Transition.id)))

    def checkpoints(self, run: uuid.UUID) -> list[Checkpoint]:
        """Newest first."""
        with self.db.read() as session:
            rows = select(Checkpoint).where(Checkpoint.run_id == run).order_by(Checkpoint.step.desc())
            return list(session.scalars(rows))

    def check(self, run: uuid.UUID, state: str, seconds: float = PATIENCE_S) -> list[Attempt]:
        """Wait for the run's last state and for its processes to be gone, then assert every invariant."""
        self.wait_for_state(run, state, seconds=seconds)
        wait_until(lambda: not self.engine_pids(run), PATIENCE_S, "no engine process is left")
        return check_run(self.db, self.settings, run, state)
