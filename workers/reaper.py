"""Finds attempts and workers that have gone, and gives their runs back.

Liveness is judged by counters that stand still on this process's own monotonic clock, never by comparing wall clocks,
and on this host also by looking whether the process exists.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from app.db import Database
from app.ingest import ingest_attempt
from app.liveness import Stillness, boot_id, exists
from app.models import Attempt, JournalEvent, Run, Worker, utc_now
from app.runs.states import ACTIVE_ATTEMPT_STATES, HELD_STATES, lose_attempt, move_attempt, transition
from app.settings import Settings
from grpo_engine.events import JOURNAL_NAME
from workers.outcome import Ending, decide
from workers.supervisor import AWAY

ACTOR = "reaper"
log = logging.getLogger("cohort.reaper")


@dataclass(frozen=True, slots=True)
class Watched:
    """An attempt as the reaper reads it."""

    id: uuid.UUID
    run_id: uuid.UUID
    number: int
    beats: int
    boot_id: str | None
    pid: int | None
    process_started: int | None
    cursor_offset: int


WATCHED = (
    Attempt.id,
    Attempt.run_id,
    Attempt.number,
    Attempt.beats,
    Attempt.boot_id,
    Attempt.pid,
    Attempt.process_started,
    Attempt.cursor_offset,
)


class Reaper:
    """Call `round` every few seconds, and once before anything else is served."""

    def __init__(self, db: Database, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._db, self._settings, self._clock = db, settings, clock
        self._stillness = Stillness(clock)
        self._tails: dict[uuid.UUID, tuple[Watched, float]] = {}
        """Attempts that ended lately and when that was seen: a late engine may still have had lines to tell."""
        self._active: dict[uuid.UUID, Watched] = {}
        self._first = True

    def round(self) -> None:
        """Raises SQLAlchemyError when the database is away; call `forget` then."""
        with self._db.read() as session:
            active = [Watched(*row) for row in session.execute(_attempts(active=True))]
            workers = session.execute(
                select(Worker.id, Worker.name, Worker.beats, Worker.boot_id, Worker.pid, Worker.process_started).where(
                    Worker.state == "online"
                )
            ).all()
        self._follow_tails(active)
        for attempt in active:
            if (why := self._why_lost(attempt.id, attempt)) is not None:
                self._end(attempt, why)
        for worker in workers:
            if (why := self._why_lost(worker.id, worker)) is not None:
                self._lose_worker(worker, why)
        self._stillness.keep_only({attempt.id for attempt in active} | {worker.id for worker in workers})

    def forget(self) -> None:
        self._stillness.forget()

    def _why_lost(self, key: uuid.UUID, seen: Any) -> str | None:
        """A sentence; None while it may be alive."""
        if seen.boot_id == boot_id() and seen.pid is not None and not exists(seen.pid, seen.process_started):
            return f"its process {seen.pid} has gone"
        still_s = self._stillness.seconds(key, seen.beats)
        if still_s >= self._settings.loss_s:
            return f"it was silent for {still_s:.0f} s"
        return None

    def _end(self, attempt: Watched, why: str) -> None:
        """Take in the journal's tail, then write what it says, or that the attempt is lost."""
        self._ingest(attempt)
        with self._db.write() as session:
            if (state := _settle(session, attempt)) is None:
                message = f"the worker of attempt {attempt.number} was lost: {why}"
                state = lose_attempt(session, attempt.id, actor=ACTOR, message=message, beats=attempt.beats)
        if state is not None:
            log.warning("attempt %s of run %s: %s; run %s", attempt.number, attempt.run_id, why, state)

    def _lose_worker(self, worker: Any, why: str) -> None:
        with self._db.write() as session:
            still = (Worker.id == worker.id, Worker.beats == worker.beats, Worker.state == "online")
            session.execute(update(Worker).where(*still).values(state="lost", ended_at=utc_now()))
        log.warning("worker %s: %s", worker.name, why)

    # ------------------------------------------------------------ tails
    def _follow_tails(self, active: list[Watched]) -> None:
        """Ingest what ended attempts still had to tell: all of them at the first round, later those that just ended."""
        now = self._clock()
        if self._first:
            with self._db.read() as session:
                ended = [Watched(*row) for row in session.execute(_attempts(active=False))]
            self._first = False
        else:
            ids = {attempt.id for attempt in active}
            ended = [attempt for attempt in self._active.values() if attempt.id not in ids]
        self._tails |= {attempt.id: (attempt, now) for attempt in ended}
        self._active = {attempt.id: attempt for attempt in active}
        for attempt, since in list(self._tails.values()):
            self._ingest(attempt)
            if now - since > self._settings.loss_s:
                del self._tails[attempt.id]

    def _ingest(self, attempt: Watched) -> None:
        """A journal that cannot be read or stored is told in the log; it must not keep other runs from being watched.

        Raises SQLAlchemyError when the database is away."""
        try:
            self._take_in(attempt)
        except AWAY:
            raise
        except Exception:
            log.exception("the journal of attempt %s of run %s cannot be taken in", attempt.number, attempt.run_id)

    def _take_in(self, attempt: Watched) -> None:
        folder = self._settings.attempt_folder(attempt.run_id, attempt.number)
        path = folder / JOURNAL_NAME
        if not path.exists() or path.stat().st_size <= attempt.cursor_offset:
            return
        while ingest_attempt(self._db, attempt.id, folder):
            log.info("took in the tail of attempt %s of run %s", attempt.number, attempt.run_id)


def _attempts(*, active: bool) -> Any:
    states = Attempt.state.in_(ACTIVE_ATTEMPT_STATES)
    return select(*WATCHED).where(states if active else ~states)


def _settle(session: Session, attempt: Watched) -> str | None:
    """The engine had finished or failed before its supervisor was lost: write that; None when it had not."""
    last = session.scalars(
        select(JournalEvent)
        .where(JournalEvent.attempt_id == attempt.id, JournalEvent.type.in_(("finished", "failed")))
        .order_by(JournalEvent.seq.desc())
        .limit(1)
    ).first()
    run = session.get_one(Run, attempt.run_id, with_for_update=True)
    if last is None or run.state not in HELD_STATES:
        return None
    ending = Ending(terminal={"type": last.type, **last.payload})
    outcome = decide(run.state, ending, restarts_left=True)
    reason, message = outcome.reason, outcome.message
    if not move_attempt(
        session,
        attempt.id,
        outcome.attempt,
        beats=attempt.beats,
        reason=reason,
        message=message,
        traceback=outcome.traceback,
    ):
        return None
    transition(session, run.id, outcome.run, actor=ACTOR, sources=HELD_STATES, reason=reason, message=message)
    return outcome.run
