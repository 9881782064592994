"""What the API says and takes about workers."""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict


class HeldOut(BaseModel):
    run_number: int
    run_name: str
    attempt: int
    state: str
    devices: list[str]


class WorkerOut(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    id: uuid.UUID
    name: str
    host: str
    pid: int
    state: str
    drain: bool
    labels: list[str]
    devices: list[Any]
    versions: dict[str, Any]
    sandbox: dict[str, Any] | None
    """How it confines programs that a model wrote: `tier` and, for each that was tried, what came of it."""
    beats: int
    last_beat_at: datetime | None
    created_at: datetime
    ended_at: datetime | None


class WorkerDetailOut(WorkerOut):
    held: list[HeldOut]


class WorkersOut(BaseModel):
    items: list[WorkerDetailOut]


class DrainIn(BaseModel):
    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"drain": True}]})

    drain: bool
