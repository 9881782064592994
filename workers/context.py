"""What the worker's main process knows and its Celery children inherit by the fork."""

from __future__ import annotations

import mmap
import uuid
from dataclasses import dataclass, field

from app.settings import Settings


@dataclass
class WorkerContext:
    settings: Settings
    worker_id: uuid.UUID
    name: str
    labels: list[str]
    devices: list[str]
    _shutdown: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, 1))
    """One byte of memory that main process and children share."""

    def request_shutdown(self) -> None:
        self._shutdown[0] = 1

    @property
    def shutting_down(self) -> bool:
        return self._shutdown[0] == 1


_current: WorkerContext | None = None


def set_context(context: WorkerContext) -> None:
    global _current
    _current = context


def get_context() -> WorkerContext:
    if _current is None:
        raise RuntimeError("this process is no worker; start one with `python -m workers`")
    return _current
