"""The worker's own row: written at start, beaten from a thread of the main process, signed off at the end."""

from __future__ import annotations

import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from sqlalchemy import update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from app.db import Database
from app.liveness import ProcessIdentity
from app.models import Worker, utc_now
from app.settings import Settings
from workers.devices import Device
from workers.strays import end_strays

log = logging.getLogger("cohort.worker")

_fork_gate = threading.Lock()
"""Held while the main process has a database connection open. SQLite must not be carried across a fork: the child
would take the parent's locks for its own."""
os.register_at_fork(before=_fork_gate.acquire, after_in_parent=_fork_gate.release, after_in_child=_fork_gate.release)


def _once(settings: Settings, action: Callable[[Session], None]) -> None:
    with _fork_gate:
        db = Database(settings.resolved_database_url)
        try:
            with db.write() as session:
                action(session)
        finally:
            db.dispose()


def register(settings: Settings, name: str, labels: list[str], devices: list[Device]) -> uuid.UUID:
    """Write this process's row; its id."""
    process = ProcessIdentity.own()
    worker = Worker(
        id=uuid.uuid4(),
        name=name,
        host=socket.gethostname(),
        boot_id=process.boot_id,
        pid=process.pid,
        process_started=process.process_started,
        state="online",
        labels=labels,
        devices=[device.as_json() for device in devices],
        beats=1,
        last_beat_at=utc_now(),
        versions={package: version(package) for package in ("cohort", "celery")},
    )
    _once(settings, lambda session: session.add(worker))
    return worker.id


def sign_off(settings: Settings, worker_id: uuid.UUID) -> None:
    """The worker said goodbye; not an error when the database is away."""
    values = {"state": "offline", "ended_at": utc_now()}
    try:
        _once(settings, lambda session: _update(session, worker_id, values))
    except SQLAlchemyError as error:
        log.warning("could not sign off: %s", error)


def write_sandbox(settings: Settings, worker_id: uuid.UUID, report: dict[str, Any]) -> None:
    """How this worker confines programs. Raises SQLAlchemyError."""
    _once(settings, lambda session: _update(session, worker_id, {"sandbox": report}))


def _update(session: Session, worker_id: uuid.UUID, values: dict[str, object]) -> None:
    session.execute(update(Worker).where(Worker.id == worker_id).values(values))


class WorkerBeat(threading.Thread):
    """Raises the counter every `beat_s`; a worker that was taken for lost is online again. Ends stray processes."""

    def __init__(self, settings: Settings, worker_id: uuid.UUID) -> None:
        super().__init__(name="worker-beat", daemon=True)
        self._settings, self._worker_id = settings, worker_id
        self._stop_event = threading.Event()

    def run(self) -> None:
        while not self._stop_event.wait(self._settings.beat_s):
            end_strays()
            try:
                _once(self._settings, self._beat)
            except SQLAlchemyError as error:
                log.warning("could not beat: %s", error)

    def stop(self) -> None:
        self._stop_event.set()
        self.join()

    def _beat(self, session: Session) -> None:
        _update(
            session,
            self._worker_id,
            {"beats": Worker.beats + 1, "last_beat_at": utc_now(), "state": "online", "ended_at": None},
        )
