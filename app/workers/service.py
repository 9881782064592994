"""Workers as the web application sees them: devices, labels, beats, the attempts they hold, draining."""

from __future__ import annotations

import uuid
from collections import defaultdict
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.errors import Conflict, NotFound
from app.models import Attempt, Run, Worker
from app.runs.states import ACTIVE_ATTEMPT_STATES


@dataclass(frozen=True, slots=True)
class HeldAttempt:
    run_number: int
    run_name: str
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class WorkerView:
    worker: Worker
    held: list[HeldAttempt]


def list_workers(session: Session, *, online: bool = False) -> list[WorkerView]:
    """Workers with the attempts they hold, online ones first, then the newest."""
    query = select(Worker).order_by(Worker.created_at.desc())
    workers = list(session.scalars(query.where(Worker.state == "online") if online else query))
    held: defaultdict[uuid.UUID | None, list[HeldAttempt]] = defaultdict(list)
    rows = session.execute(
        select(Run.number, Run.name, Attempt)
        .join(Run, Run.id == Attempt.run_id)
        .where(Attempt.state.in_(ACTIVE_ATTEMPT_STATES))
        .order_by(Run.number)
    )
    for number, name, attempt in rows:
        held[attempt.worker_id].append(HeldAttempt(number, name, attempt))
    workers.sort(key=lambda worker: worker.state != "online")
    return [WorkerView(worker, held[worker.id]) for worker in workers]


def get_worker(session: Session, worker_id: uuid.UUID) -> Worker:
    worker = session.get(Worker, worker_id)
    if worker is None:
        raise NotFound(f"There is no worker {worker_id}.")
    return worker


def set_drain(session: Session, worker_id: uuid.UUID, drain: bool) -> Worker:
    """A draining worker finishes what it holds and takes no new run. Raises Conflict when it is not online."""
    worker = get_worker(session, worker_id)
    if worker.state != "online":
        raise Conflict(f"Worker {worker.name} is {worker.state}.")
    worker.drain = drain
    session.flush()
    return worker
