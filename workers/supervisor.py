"""One attempt from claim to end: starts the engine, renews its deadline, ships its journal, writes how it ended.

Everything runs in one thread, the process's main one: the kernel's parent-death signal follows the starting thread.
A database that is locked or gone delays what is told to it and ends nothing; only a missed deadline holds the engine.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import select, update
from sqlalchemy.exc import InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from app.db import Database
from app.ingest import ingest_attempt
from app.models import Attempt, Run, utc_now
from app.runs.states import ACTIVE_ATTEMPT_STATES, move_attempt, transition
from app.settings import Settings
from grpo_engine.control import FIRST_DEADLINE
from grpo_engine.events import boot_clock_s
from grpo_engine.launch import Ranks, start_ranks
from workers.devices import DeviceLocks, device_environment
from workers.journal_watch import JournalWatch
from workers.outcome import Ending, decide, not_started, oom_kills, read_tail, told_by_another_rank
from workers.prepare import Prepared, prepare

T = TypeVar("T")
TICK_S = 0.05
RETRY_S = 0.5
LOST_GRACE_S = 1.0
"""Between telling an engine that its run is lost and killing it."""
AWAY = (OperationalError, InterfaceError, PoolTimeout)
"""The database is locked or cannot be reached; worth another try."""
UNTOLD = "untold"
"""The engine has not heard which early-stopping mode the operator wants; None is the config's."""
log = logging.getLogger("cohort.worker")


class Supervisor:
    def __init__(
        self,
        db: Database,
        settings: Settings,
        attempt: Attempt,
        locks: DeviceLocks,
        *,
        actor: str,
        claimed_boot_s: float,
        shutting_down: Callable[[], bool],
    ) -> None:
        """`claimed_boot_s`: boot clock before the claim was sent; the claim counts as the first beat."""
        self.db, self.settings, self.attempt, self.locks = db, settings, attempt, locks
        self.actor, self.shutting_down = actor, shutting_down
        self.lost = False
        self._deadline_boot_s = claimed_boot_s + settings.deadline_s
        self._next_beat = time.monotonic() + settings.beat_s
        self._next_ship = 0.0
        self._kill_at: float | None = None
        self._asked = False
        self._told_lost = False
        self._announced = False
        self._told_mode: str | None = UNTOLD
        self._folder = settings.attempt_folder(attempt.run_id, attempt.number)
        self._journal = JournalWatch(self._folder)

    def run(self) -> str | None:
        """Supervise to the end; the run's new state, None when the attempt was lost."""
        oom_before = oom_kills()
        try:
            ranks = self._start(self._prepare())
        except Exception as error:  # whatever it was, the run must not wait for a worker that gave up
            log.exception("attempt %s could not be started", self.attempt.id)
            ending = Ending(terminal=not_started(error))
            return self._finish(ending)
        try:
            status = self._watch(ranks)
        finally:
            ranks.kill()
        self._drain_journal()
        ending = Ending(
            terminal=self._journal.terminal or told_by_another_rank(self._folder),
            exit_status=status,
            failed_rank=ranks.failed_rank,
            asked=self._asked,
            shutting_down=self.shutting_down(),
            out_of_memory=oom_kills() > oom_before and not self._asked,
            log_tail=read_tail(self._folder / "engine.log"),
        )
        return self._finish(ending)

    # ------------------------------------------------------------ starting
    def _prepare(self) -> Prepared:
        while True:
            try:
                return self._while_beating(lambda: prepare(self.db, self.settings, self.attempt))
            except AWAY as error:
                log.warning("database is away, trying again to prepare attempt %s: %s", self.attempt.id, error)
            time.sleep(RETRY_S)

    def _start(self, prepared: Prepared) -> Ranks:
        if prepared.resumed_from is not None:
            self._insist(lambda: self._write_attempt({"resumed_from_id": prepared.resumed_from}))
        env = {FIRST_DEADLINE: repr(self._deadline_boot_s)} | device_environment(self.attempt.devices)
        log.info("attempt %s: starting %s", self.attempt.id, " ".join(prepared.argv))
        return start_ranks(
            prepared.argv,
            num_ranks=prepared.num_ranks,
            log_path=prepared.folder / "engine.log",
            env=env,
            pass_fds=self.locks.descriptors(),
        )

    def _while_beating(self, work: Callable[[], T]) -> T:
        """Run `work` (hashing a large checkpoint takes minutes) beside the beats; raises what it raises."""
        results: list[T] = []
        errors: list[BaseException] = []

        def call() -> None:
            try:
                results.append(work())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        while thread.is_alive():
            self._beat_when_due(None)
            thread.join(TICK_S)
        if errors:
            raise errors[0]
        return results[0]

    # ------------------------------------------------------------ watching
    def _watch(self, ranks: Ranks) -> int:
        while (status := ranks.poll()) is None:
            self._beat_when_due(ranks)
            if time.monotonic() >= self._next_ship:
                self._journal.read()
                self._attempt("ship", self._ship)
                self._attempt("read the operator's wishes", lambda: self._obey(ranks))
                self._next_ship = time.monotonic() + self.settings.ship_s
            self._stop_when_asked(ranks)
            time.sleep(TICK_S)
        return status

    def _beat_when_due(self, ranks: Ranks | None) -> None:
        if time.monotonic() < self._next_beat or self.lost:
            return
        self._next_beat = time.monotonic() + self.settings.beat_s
        sent = boot_clock_s()
        accepted = self._attempt(
            "beat", lambda: self._write_attempt({"beats": Attempt.beats + 1, "last_beat_at": utc_now()})
        )
        if accepted:
            self._deadline_boot_s = sent + self.settings.deadline_s
            if ranks is not None:
                ranks.send({"deadline_boot_s": self._deadline_boot_s})
        elif accepted is False:
            self.lost = True
        else:  # the database is away: try again soon, the engine waits at its deadline
            self._next_beat = time.monotonic() + min(RETRY_S, self.settings.beat_s)

    def _write_attempt(self, values: dict[str, Any]) -> bool:
        """Whether the attempt is still ours."""
        ours = update(Attempt).where(
            Attempt.id == self.attempt.id,
            Attempt.token == self.attempt.token,
            Attempt.state.in_(ACTIVE_ATTEMPT_STATES),
        )
        with self.db.write() as session:
            return bool(session.connection().execute(ours.values(values)).rowcount)

    def _ship(self) -> None:
        ingest_attempt(self.db, self.attempt.id, self._folder)
        if self._journal.started and not self._announced:
            with self.db.write() as session:
                started = transition(
                    session,
                    self.attempt.run_id,
                    "running",
                    actor=self.actor,
                    token=self.attempt.token,
                    sources=("starting",),
                )
                move_attempt(session, self.attempt.id, "running", token=self.attempt.token)
            self._announced = True
            log.info(
                "attempt %s: engine started%s", self.attempt.id, "" if started else ", a stop is already asked for"
            )

    def _obey(self, ranks: Ranks) -> None:
        with self.db.read() as session:
            state, override, attempt_state = session.execute(
                select(Run.state, Run.early_stopping_override, Attempt.state)
                .join(Attempt, Attempt.run_id == Run.id)
                .where(Attempt.id == self.attempt.id)
            ).one()
        if attempt_state not in ACTIVE_ATTEMPT_STATES:
            self.lost = True
        if override != self._told_mode:
            ranks.send({"early_stopping": override})
            self._told_mode = override
        if state in ("pausing", "cancelling"):
            self._ask_to_stop(ranks, state)

    def _stop_when_asked(self, ranks: Ranks) -> None:
        now = time.monotonic()
        if self.lost and not self._told_lost:
            log.warning("attempt %s is lost; ending its engine", self.attempt.id)
            ranks.send({"lost": True})
            self._told_lost, self._asked, self._kill_at = True, True, now + LOST_GRACE_S
        if self.shutting_down():
            self._ask_to_stop(ranks, "the worker is shutting down")
        if self._journal.terminal is not None and self._kill_at is None:
            self._kill_at = now + self.settings.stop_grace_s  # it has said how it ended and should be gone
        if self._kill_at is not None and now >= self._kill_at:
            log.warning("attempt %s: the engine outlived its grace and is killed", self.attempt.id)
            ranks.kill()

    def _ask_to_stop(self, ranks: Ranks, why: str) -> None:
        if self._asked:
            return
        log.info("attempt %s: asking the engine to stop (%s)", self.attempt.id, why)
        ranks.terminate()
        self._asked, self._kill_at = True, time.monotonic() + self.settings.stop_grace_s
        self._attempt("note the stop", self._note_stop)

    def _note_stop(self) -> None:
        with self.db.write() as session:
            move_attempt(session, self.attempt.id, "stopping", token=self.attempt.token)

    # ------------------------------------------------------------ ending
    def _drain_journal(self) -> None:
        self._journal.read()
        while self._insist(lambda: ingest_attempt(self.db, self.attempt.id, self._folder)):
            self._beat_when_due(None)

    def _finish(self, ending: Ending) -> str | None:
        target = self._insist(lambda: self._write_outcome(ending))
        log.info("attempt %s: %s", self.attempt.id, f"run {target}" if target else "lost, nothing more is written")
        return target

    def _write_outcome(self, ending: Ending) -> str | None:
        with self.db.write() as session:
            run = session.get_one(Run, self.attempt.run_id, with_for_update=True)
            outcome = decide(run.state, ending, restarts_left=run.restarts < run.max_restarts)
            moved = transition(
                session,
                run.id,
                outcome.run,
                actor=self.actor,
                reason=outcome.reason,
                message=outcome.message,
                token=self.attempt.token,
                restart=outcome.restart,
            )
            if moved:
                move_attempt(
                    session,
                    self.attempt.id,
                    outcome.attempt,
                    token=self.attempt.token,
                    reason=outcome.reason,
                    message=outcome.message,
                    traceback=outcome.traceback,
                )
            return outcome.run if moved else None

    # ------------------------------------------------------------ database
    def _attempt(self, what: str, action: Callable[[], T]) -> T | None:
        """The action's result; None and a log line when it fails, which must never end the engine."""
        try:
            return action()
        except AWAY as error:
            log.warning("database is away, could not %s: %s", what, error)
        except Exception:
            log.exception("could not %s", what)
        return None

    def _insist(self, action: Callable[[], T]) -> T | None:
        """Repeat until the database answers; None when it refuses for good or the attempt was lost meanwhile."""
        while True:
            try:
                return action()
            except AWAY as error:
                log.warning("database is away, trying again: %s", error)
            except SQLAlchemyError:
                log.exception("the database refuses what is written for attempt %s", self.attempt.id)
                return None
            time.sleep(RETRY_S)
            self._beat_when_due(None)
