"""`python -m workers.scheduler`: reaps what has gone and tells idle workers of queued runs, round after round.

The first round comes before anything else, so that a restart of the house leaves no run in a state that is not true.
Several schedulers at once do no harm: every change is a guarded UPDATE.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from types import FrameType

import redis
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from app.broker import QUEUE, SEND_TIMEOUT_S, redis_url, send_work
from app.db import Database
from app.models import Run, Worker
from app.settings import Settings, get_settings
from workers.claim import fitting_devices
from workers.reaper import Reaper

log = logging.getLogger("cohort.scheduler")


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    settings = get_settings()
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    db = Database(settings.resolved_database_url)
    try:
        run_rounds(db, settings, stop)
    finally:
        db.dispose()
    return 0


def run_rounds(db: Database, settings: Settings, stop: threading.Event) -> None:
    """Until `stop` is set. A database or broker that is away delays rounds and ends nothing."""
    reaper = Reaper(db, settings)
    while not stop.is_set():
        try:
            reaper.round()
            call_workers(db, settings)
        except SQLAlchemyError as error:
            log.warning("database is away, watching begins anew: %s", error)
            reaper.forget()
        stop.wait(settings.reap_s)


def call_workers(db: Database, settings: Settings) -> int:
    """One message for each worker that a queued run fits, less those still unread; how many were sent."""
    with db.read() as session:
        needs = list(session.scalars(select(Run.needs).where(Run.state == "queued")))
        if not needs:
            return 0
        offers = session.execute(
            select(Worker.devices, Worker.labels).where(Worker.state == "online", ~Worker.drain)
        ).all()
    called = 0
    for devices, labels in offers:
        ids = [device["id"] for device in devices]
        called += any(fitting_devices(need, ids, labels) is not None for need in needs)
    missing = called - unread_messages(settings) if called else 0
    for _ in range(missing):
        if not send_work(settings):
            break
    return max(missing, 0)


def unread_messages(settings: Settings) -> int:
    """Messages waiting in the queue; 0 when the broker is away."""
    url = redis_url(settings)
    client = redis.Redis.from_url(url, socket_timeout=SEND_TIMEOUT_S, socket_connect_timeout=SEND_TIMEOUT_S)
    try:
        return int(client.llen(QUEUE))
    except redis.RedisError:
        return 0
    finally:
        client.close()


if __name__ == "__main__":
    sys.exit(main())
