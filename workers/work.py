"""What the Celery task does: claim and supervise, run after run, until nothing fits."""

from __future__ import annotations

import logging
import signal
from types import FrameType

from sqlalchemy.exc import SQLAlchemyError

from app.broker import send_work
from app.db import Database
from app.models import Attempt
from grpo_engine.events import boot_clock_s
from workers.claim import claim
from workers.context import WorkerContext
from workers.devices import DeviceLocks
from workers.supervisor import Supervisor

log = logging.getLogger("cohort.worker")


class Stopping:
    """Whether this process should end its engine: the worker shuts down, or this child alone got SIGTERM."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._signalled = False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def __call__(self) -> bool:
        return self._signalled or self._context.shutting_down


def work_until_idle(context: WorkerContext) -> int:
    """Supervise runs one after the other on this worker's free devices; how many."""
    stopping = Stopping(context)
    handler_before = signal.signal(signal.SIGTERM, stopping.on_signal)
    db = Database(context.settings.resolved_database_url)
    count = 0
    try:
        while not stopping() and _work_once(context, db, stopping):
            count += 1
    finally:
        db.dispose()
        signal.signal(signal.SIGTERM, handler_before)
    return count


def _work_once(context: WorkerContext, db: Database, stopping: Stopping) -> bool:
    settings = context.settings
    with DeviceLocks(settings.home, context.devices) as locks:
        claimed_boot_s = boot_clock_s()
        attempt = _claim(context, db, locks.devices)
        if attempt is None:
            return False
        locks.keep_only(attempt.devices)
        state = Supervisor(
            db,
            settings,
            attempt,
            locks,
            actor=f"worker:{context.name}",
            claimed_boot_s=claimed_boot_s,
            shutting_down=stopping,
        ).run()
    if state == "queued":
        send_work(settings)
    return True


def _claim(context: WorkerContext, db: Database, free_devices: list[str]) -> Attempt | None:
    try:
        with db.write() as session:
            return claim(session, context.worker_id, free_devices, context.labels)
    except SQLAlchemyError as error:
        log.warning("could not claim (%s); the scheduler will send again", error)
        return None
