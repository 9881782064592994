"""Page of workers: devices, labels, beats, the attempts they hold, draining."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Form, Request
from fastapi.responses import Response

from app.errors import Conflict
from app.formatting import size
from app.models import Worker
from app.security import Admin, Reader
from app.sessions import ReadSession, WriteSession
from app.web import page, pages_router, redirect
from app.workers import service
from app.workers.service import WorkerView

router = pages_router()
MAX_GONE = 20


@dataclass(frozen=True)
class WorkerRow:
    view: WorkerView
    state: str
    devices: list[str]
    sandbox: str
    """How it confines programs: the tier, "testing" before that is known."""
    sandbox_details: list[str]


@dataclass(frozen=True)
class WorkersContext:
    online: list[WorkerRow]
    gone: list[WorkerRow]


@router.get("/workers")
def list_workers(request: Request, _: Reader, session: ReadSession) -> Response:
    rows = [_row(view) for view in service.list_workers(session)]
    online = [row for row in rows if row.view.worker.state == "online"]
    gone = [row for row in rows if row.view.worker.state != "online"][:MAX_GONE]
    return page(request, "workers/list.html", WorkersContext(online, gone))


def _row(view: WorkerView) -> WorkerRow:
    worker = view.worker
    state = "draining" if worker.drain and worker.state == "online" else worker.state
    devices = [_device(device) for device in worker.devices]
    return WorkerRow(view, state, devices, *_sandbox(worker))


def _sandbox(worker: Worker) -> tuple[str, list[str]]:
    """Example: "bubblewrap", ["landlock_abi: 7", "bubblewrap: passed"]."""
    if not isinstance(worker.sandbox, dict):
        return ("testing" if worker.state == "online" else "–"), []
    details = worker.sandbox.get("details") or {}
    return str(worker.sandbox.get("tier", "–")), [f"{name}: {value}" for name, value in details.items()]


def _device(device: Any) -> str:
    """Example: "cuda:0 · NVIDIA H200 · 141 GB"."""
    if not isinstance(device, dict):
        return str(device)
    memory = size(device["memory_bytes"]) if device.get("memory_bytes") else ""
    return " · ".join(part for part in (str(device.get("id", "")), str(device.get("name", "")), memory) if part)


@router.post("/workers/{worker_id}/drain")
def drain(_: Admin, session: WriteSession, worker_id: uuid.UUID, drain: Annotated[bool, Form()]) -> Response:
    try:
        worker = service.set_drain(session, worker_id, drain)
    except Conflict as error:
        return redirect("/workers", error.detail, "warn")
    words = "finishes what it holds and takes no new run" if drain else "takes new runs again"
    return redirect("/workers", f"{worker.name} {words}.")
