"""What a journal told: events, metric points, rollout batches, evaluations, self-tests, checkpoints, findings.

All are keyed by attempt and journal sequence, so ingesting a line twice changes nothing.
"""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, ForeignKey, Index, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, WithId


class JournalEvent(Base):
    """Every journal line but `metrics` and `heartbeat`, as it was written."""

    __tablename__ = "events"

    attempt_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("attempts.id"), primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True)
    time: Mapped[datetime]
    type: Mapped[str] = mapped_column(String(32), index=True)
    stage: Mapped[str | None] = mapped_column(String(40))
    step: Mapped[int | None]
    payload: Mapped[dict[str, Any]]


class Series(Base):
    """One metric of one stage of one attempt."""

    __tablename__ = "series"
    __table_args__ = (UniqueConstraint("attempt_id", "stage", "name"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    attempt_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("attempts.id"))
    stage: Mapped[str] = mapped_column(String(40))
    name: Mapped[str] = mapped_column(String(200))


class Point(Base):
    __tablename__ = "points"
    __table_args__ = {"sqlite_with_rowid": False}

    series_id: Mapped[int] = mapped_column(ForeignKey("series.id"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[float | None]
    kind: Mapped[str | None] = mapped_column(String(4))
    """nan, +inf or -inf where value is null."""
    time: Mapped[datetime]


class RolloutBatch(Base):
    __tablename__ = "rollout_batches"
    __table_args__ = (UniqueConstraint("attempt_id", "batch"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    attempt_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("attempts.id"))
    batch: Mapped[int]
    stage: Mapped[str] = mapped_column(String(40))
    path: Mapped[str] = mapped_column(String(500))
    """Artifact key: relative to home."""
    num_groups: Mapped[int]
    num_completions: Mapped[int]
    step: Mapped[int | None]
    """Step that trained on it; null until one did."""


class EvaluationResult(Base):
    __tablename__ = "evaluations"
    __table_args__ = (UniqueConstraint("attempt_id", "seq"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    attempt_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("attempts.id"))
    seq: Mapped[int]
    stage: Mapped[str] = mapped_column(String(40))
    step: Mapped[int]
    benchmark: Mapped[str] = mapped_column(String(200))
    num_prompts: Mapped[int]
    metrics: Mapped[dict[str, Any]]


class SelfTestRow(Base):
    """One check before a stage's training."""

    __tablename__ = "self_tests"

    attempt_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("attempts.id"), primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True)
    stage: Mapped[str] = mapped_column(String(40))
    name: Mapped[str] = mapped_column(String(100))
    passed: Mapped[bool]
    detail: Mapped[str] = mapped_column(Text)
    at: Mapped[datetime]


class Checkpoint(WithId, Base):
    __tablename__ = "checkpoints"
    __table_args__ = (UniqueConstraint("attempt_id", "stage", "step"),)

    run_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("runs.id"), index=True)
    attempt_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("attempts.id"))
    stage: Mapped[str] = mapped_column(String(40))
    stage_index: Mapped[int]
    step: Mapped[int]
    path: Mapped[str] = mapped_column(String(500))
    """Artifact key: relative to home."""
    bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(String(64))
    metrics: Mapped[dict[str, Any]]
    parent_id: Mapped[uuid.UUID | None]
    """Checkpoint before it: the attempt's previous one, else the one resumed or forked from."""
    state: Mapped[str] = mapped_column(String(16), default="saved")
    """saved, verified (hashes re-read and equal), damaged, removed (by retention)."""
    saved_at: Mapped[datetime]
    verified_at: Mapped[datetime | None]


class FindingRow(Base):
    __tablename__ = "findings"
    __table_args__ = (UniqueConstraint("attempt_id", "seq"), Index("ix_findings_run_id", "run_id"))

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("runs.id"))
    attempt_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("attempts.id"))
    seq: Mapped[int]
    stage: Mapped[str | None] = mapped_column(String(40))
    step: Mapped[int]
    detector: Mapped[str] = mapped_column(String(60))
    severity: Mapped[str] = mapped_column(String(16))
    onset_step: Mapped[int]
    title: Mapped[str] = mapped_column(Text)
    evidence: Mapped[str] = mapped_column(Text)
    remedy: Mapped[str] = mapped_column(Text)
    state: Mapped[str] = mapped_column(String(16), default="open")
    """open, resolved (the detector withdrew it)."""
    at: Mapped[datetime]
