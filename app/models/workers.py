"""Workers: where runs are trained."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, String
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, WithCreation, WithId


class Worker(WithId, WithCreation, Base):
    """One worker process. Identity is (host, boot id, pid, process start); a match on a part is no match."""

    __tablename__ = "workers"

    name: Mapped[str] = mapped_column(String(120), index=True)
    host: Mapped[str] = mapped_column(String(255))
    boot_id: Mapped[str] = mapped_column(String(40))
    pid: Mapped[int]
    process_started: Mapped[int] = mapped_column(BigInteger)
    state: Mapped[str] = mapped_column(String(16), index=True)
    """online, offline (said goodbye), lost (stopped beating)."""
    labels: Mapped[list[str]]
    devices: Mapped[list[Any]]
    """[{"id": "cpu:0", "kind": "cpu", "name": "AMD EPYC", "memory_bytes": 25769803776}]"""
    drain: Mapped[bool] = mapped_column(default=False)
    """True: takes no new run."""
    beats: Mapped[int] = mapped_column(default=0)
    last_beat_at: Mapped[datetime | None]
    versions: Mapped[dict[str, Any]]
    sandbox: Mapped[dict[str, Any] | None]
    """{"tier": "bubblewrap", "details": {...}} once the worker has tried how it can confine programs; None before."""
    ended_at: Mapped[datetime | None]
