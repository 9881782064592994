"""Claiming: a worker takes the best queued run that fits what it has, and nobody else gets it."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.liveness import ProcessIdentity
from app.models import Attempt, Run, Worker, utc_now
from app.runs.states import transition

TOKEN_BYTES = 16


def fitting_devices(needs: Mapping[str, Any], devices: Sequence[str], labels: Iterable[str]) -> list[str] | None:
    """The devices a run would get; None when they are too few, of another kind, or a label is missing.

    A GPU carries one rank. On CPU the ranks are processes of one host and share its cores: a worker that offers fewer
    CPU devices than ranks takes the run all the same, or a worker's usual cpu:0 could never train on two."""
    count = int(needs.get("num_ranks", 1))
    kind = str(needs.get("device", "cpu"))
    suitable = [device for device in devices if device.partition(":")[0] == kind]
    required = 1 if kind == "cpu" else count
    if len(suitable) < required or not set(needs.get("labels", [])) <= set(labels):
        return None
    return suitable[:count]


def claim(session: Session, worker_id: uuid.UUID, free_devices: Sequence[str], labels: Iterable[str]) -> Attempt | None:
    """Take the first fitting run by priority, then waiting time, as a new attempt; None when nothing fits.

    A worker that drains, or whose row is gone, takes nothing.
    """
    worker = session.get(Worker, worker_id)
    if worker is None or worker.drain:
        return None
    labels = set(labels)
    queue = (
        select(Run.id, Run.needs).where(Run.state == "queued").order_by(Run.priority.desc(), Run.queued_at, Run.number)
    )
    for run_id, needs in session.execute(queue).all():
        devices = fitting_devices(needs, free_devices, labels)
        message = f"taken by worker {worker.name}"
        if devices is not None and transition(
            session, run_id, "starting", actor=f"worker:{worker.name}", message=message, sources=("queued",)
        ):
            return _new_attempt(session, run_id, worker_id, devices)
    return None


def _new_attempt(session: Session, run_id: uuid.UUID, worker_id: uuid.UUID, devices: list[str]) -> Attempt:
    run = session.get_one(Run, run_id, populate_existing=True)
    process = ProcessIdentity.own()
    attempt = Attempt(
        id=uuid.uuid4(),
        run_id=run_id,
        number=run.num_attempts,
        token=secrets.token_hex(TOKEN_BYTES),
        state="starting",
        worker_id=worker_id,
        devices=devices,
        beats=1,
        last_beat_at=utc_now(),
        boot_id=process.boot_id,
        pid=process.pid,
        process_started=process.process_started,
    )
    session.add(attempt)
    session.flush()
    return attempt
