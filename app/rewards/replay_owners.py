"""Who works on a replay: the web process that took it. It beats while the replay is open.

A replay is given up when its process has gone. Of this boot that is looked up; a process elsewhere, or of an earlier
boot, counts as gone when its beats stood still for COHORT_LOSS_S on this process's own clock. What other living web
processes work on is left alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.exc import SQLAlchemyError

from app.db import Database
from app.liveness import ProcessIdentity, Stillness, boot_id, exists
from app.models import Replay, utc_now
from app.settings import Settings

logger = logging.getLogger(__name__)
LOST = "The web application that worked on this ended before it was done; start the replay again."
_IS_OPEN = Replay.state.in_(("queued", "running"))


class ReplayKeeper:
    """Beats for the replays of this process and gives up those of processes that have gone."""

    def __init__(self, database: Database, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._database, self._settings = database, settings
        self._own = ProcessIdentity.own()
        self._stillness = Stillness(clock)

    def run(self, stop: threading.Event) -> None:
        """A round every COHORT_BEAT_S. Never raises."""
        while not stop.wait(self._settings.beat_s):
            try:
                self.round()
            except SQLAlchemyError as error:
                logger.warning("the replays cannot be looked after: %s", error)
                self._stillness.forget()

    def round(self) -> None:
        """Raises SQLAlchemyError when the database is away."""
        columns = (Replay.id, Replay.beats, Replay.boot_id, Replay.pid, Replay.process_started)
        with self._database.read() as session:
            rows = session.execute(select(*columns).where(_IS_OPEN)).all()
        own = [row.id for row in rows if tuple(row[2:]) == astuple(self._own)]
        lost = [row for row in rows if row.id not in own and self._is_lost(row)]
        self._stillness.keep_only({row.id for row in rows})
        if not (own or lost):
            return
        with self._database.write() as session:
            session.execute(update(Replay).where(Replay.id.in_(own), _IS_OPEN).values(beats=Replay.beats + 1))
            ended = {"state": "failed", "message": LOST, "ended_at": utc_now()}
            for row in lost:
                still = (Replay.id == row.id, Replay.beats == row.beats, _IS_OPEN)
                session.execute(update(Replay).where(*still).values(**ended))

    def _is_lost(self, row: Any) -> bool:
        if row.pid is None or (row.boot_id == boot_id() and not exists(row.pid, row.process_started)):
            return True
        return self._stillness.seconds(row.id, row.beats) >= self._settings.loss_s


@contextmanager
def replays_kept(database: Database, settings: Settings) -> Iterator[None]:
    """While a web process serves: the first round at once, then a thread's. Raises SQLAlchemyError in the first."""
    keeper, stop = ReplayKeeper(database, settings), threading.Event()
    keeper.round()
    thread = threading.Thread(target=keeper.run, args=(stop,), daemon=True, name="replays")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(settings.beat_s)
