"""What the API says about checkpoints."""

from __future__ import annotations

import uuid
from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field


class CheckpointOut(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    id: uuid.UUID
    run_id: uuid.UUID
    run_number: int
    attempt: int
    stage: str
    step: int
    bytes: int
    sha256: str = Field(description="Of manifest.json, which lists the hash of every file")
    metrics: dict[str, float | None]
    parent_id: uuid.UUID | None
    parent_step: int | None
    state: str = Field(description="saved, verified, damaged, removed")
    saved_at: datetime
    verified_at: datetime | None


class CheckpointsOut(BaseModel):
    items: list[CheckpointOut]
    next_cursor: str | None


class VerificationOut(BaseModel):
    checkpoint: CheckpointOut
    damage: list[str] = Field(description="What differs from the manifest; empty when every byte is as it was written")


class FileOut(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    path: str
    bytes: int


class FilesOut(BaseModel):
    items: list[FileOut]
