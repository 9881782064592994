"""REST: workers."""

from __future__ import annotations

import uuid

from fastapi import APIRouter

from app.idempotency import ApiRoute
from app.models import Worker
from app.security import Admin, Reader
from app.sessions import ReadSession, WriteSession
from app.workers import service
from app.workers.schemas import DrainIn, HeldOut, WorkerDetailOut, WorkerOut, WorkersOut

router = APIRouter(prefix="/workers", tags=["workers"], route_class=ApiRoute)


@router.get("")
def list_workers(_: Reader, session: ReadSession, online: bool = False) -> WorkersOut:
    """Workers with devices, labels, last beat and the attempts they hold."""
    return WorkersOut(items=[_out(view) for view in service.list_workers(session, online=online)])


def _out(view: service.WorkerView) -> WorkerDetailOut:
    held = [
        HeldOut(
            run_number=entry.run_number,
            run_name=entry.run_name,
            attempt=entry.attempt.number,
            state=entry.attempt.state,
            devices=entry.attempt.devices,
        )
        for entry in view.held
    ]
    return WorkerDetailOut(**WorkerOut.model_validate(view.worker).model_dump(), held=held)


@router.put("/{worker_id}/drain", response_model=WorkerOut)
def set_drain(_: Admin, worker_id: uuid.UUID, body: DrainIn, session: WriteSession) -> Worker:
    """A draining worker finishes what it holds and takes no new run."""
    return service.set_drain(session, worker_id, body.drain)
