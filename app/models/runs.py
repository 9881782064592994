"""Runs, their attempts, and every change of state."""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, ForeignKey, Index, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, WithCreation, WithId


class Run(WithId, WithCreation, Base):
    __tablename__ = "runs"
    __table_args__ = (Index("ix_runs_queue", "state", "priority", "queued_at"),)

    number: Mapped[int] = mapped_column(unique=True)
    """Short number for people, from 1."""
    name: Mapped[str] = mapped_column(String(200))
    tags: Mapped[list[str]]
    state: Mapped[str] = mapped_column(String(16), index=True)
    reason: Mapped[str | None] = mapped_column(String(40))
    """Typed reason of the last end or pause."""
    message: Mapped[str | None] = mapped_column(Text)
    """The reason as a sentence for a person."""

    config: Mapped[dict[str, Any]]
    """RunConfig as JSON, resolved and frozen at launch."""
    config_hash: Mapped[str] = mapped_column(String(64))
    config_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("configs.id"))
    reward_sources: Mapped[dict[str, Any]]
    """Custom reward name -> RewardSource.hash."""
    git_commit: Mapped[str | None] = mapped_column(String(40))

    owner_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("users.id"))
    priority: Mapped[int] = mapped_column(default=0)
    needs: Mapped[dict[str, Any]]
    """RunConfig.needs: device, num_ranks, labels."""
    max_restarts: Mapped[int] = mapped_column(default=3)
    restarts: Mapped[int] = mapped_column(default=0)
    """Attempts lost and queued again so far."""
    num_attempts: Mapped[int] = mapped_column(default=0)

    parent_checkpoint_id: Mapped[uuid.UUID | None]
    """Checkpoint it was forked from."""
    parent_run_id: Mapped[uuid.UUID | None]
    """Run it was cloned or forked from."""
    imported: Mapped[bool] = mapped_column(default=False)
    early_stopping_override: Mapped[str | None] = mapped_column(String(8))
    """off, observe or stop, set by the operator; None = as configured."""

    version: Mapped[int] = mapped_column(default=0)
    """Rises with every ingest and change of state; live pages follow it."""
    stage: Mapped[str | None] = mapped_column(String(40))
    """Key of the current stage, such as 1-rl."""
    step: Mapped[int] = mapped_column(default=0)
    """Steps done in the current stage."""
    stage_steps: Mapped[int] = mapped_column(default=0)
    """Steps of the current stage in all."""
    steps_done: Mapped[int] = mapped_column(default=0)
    """Steps done over all stages."""
    total_steps: Mapped[int] = mapped_column(default=0)
    last_reward: Mapped[float | None]
    sparkline: Mapped[list[Any]]
    """Up to 60 rewards for the runs table."""
    last_step_at: Mapped[datetime | None]

    queued_at: Mapped[datetime | None]
    started_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]


class Attempt(WithId, WithCreation, Base):
    """One try of a run on a worker. `token` fences every write of its supervisor."""

    __tablename__ = "attempts"
    __table_args__ = (UniqueConstraint("run_id", "number"),)

    run_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("runs.id"), index=True)
    number: Mapped[int]
    token: Mapped[str] = mapped_column(String(32))
    state: Mapped[str] = mapped_column(String(16), index=True)
    """starting, running, stopping, finished, failed, stopped, lost."""
    reason: Mapped[str | None] = mapped_column(String(40))
    message: Mapped[str | None] = mapped_column(Text)
    traceback: Mapped[str | None] = mapped_column(Text)

    worker_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("workers.id"))
    devices: Mapped[list[str]]
    """Devices it holds, such as ["cpu:0"]."""
    beats: Mapped[int] = mapped_column(default=0)
    """Raised by the supervisor; the reaper watches it change."""
    last_beat_at: Mapped[datetime | None]
    boot_id: Mapped[str | None] = mapped_column(String(40))
    pid: Mapped[int | None]
    """Supervisor's process."""
    process_started: Mapped[int | None] = mapped_column(BigInteger)
    """Its start time in clock ticks since boot (field 22 of /proc/<pid>/stat)."""

    resumed_from_id: Mapped[uuid.UUID | None]
    """Checkpoint it continues from."""
    first_step: Mapped[int] = mapped_column(default=0)
    """Steps over all stages already done when it began."""
    repeated_steps: Mapped[int] = mapped_column(default=0)
    """Steps of earlier attempts that it trained again."""
    cursor_seq: Mapped[int] = mapped_column(default=0)
    """Last journal line ingested."""
    cursor_offset: Mapped[int] = mapped_column(BigInteger, default=0)
    """Byte of journal.jsonl after that line."""
    last_event_at: Mapped[datetime | None]
    started_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]


class Transition(Base):
    """One change of a run's state: who, when, why."""

    __tablename__ = "transitions"

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("runs.id"), index=True)
    attempt_number: Mapped[int | None]
    source: Mapped[str | None] = mapped_column(String(16))
    target: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str | None] = mapped_column(String(40))
    message: Mapped[str | None] = mapped_column(Text)
    actor: Mapped[str] = mapped_column(String(120))
    """User name, `worker:<name>` or `reaper`."""
    at: Mapped[datetime]
