"""Named, versioned configs, registered reward sources, and replays by other rewards."""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, ForeignKey, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, WithCreation, WithId


class NamedConfig(WithId, WithCreation, Base):
    """One version of a named config; versions are never changed."""

    __tablename__ = "configs"
    __table_args__ = (UniqueConstraint("name", "version"),)

    name: Mapped[str] = mapped_column(String(200))
    version: Mapped[int]
    data: Mapped[dict[str, Any]]
    """RunConfig as JSON, resolved."""
    hash: Mapped[str] = mapped_column(String(64))
    note: Mapped[str] = mapped_column(Text, default="")
    owner_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("users.id"))


class RewardSource(WithId, WithCreation, Base):
    """A user's reward function by name and content hash. Registering needs the `code` permission."""

    __tablename__ = "reward_sources"
    __table_args__ = (UniqueConstraint("name", "hash"),)

    name: Mapped[str] = mapped_column(String(64), index=True)
    hash: Mapped[str] = mapped_column(String(64))
    source: Mapped[str] = mapped_column(Text)
    owner_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("users.id"))


class Replay(WithId, WithCreation, Base):
    """A run's stored rollouts scored again by other rewards. The rollouts stay as they are."""

    __tablename__ = "replays"

    run_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("runs.id"), index=True)
    owner_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("users.id"))
    stage: Mapped[str] = mapped_column(String(40))
    config: Mapped[dict[str, Any]]
    """rewards, reward_clip and, for gym, data."""
    state: Mapped[str] = mapped_column(String(16), default="queued")
    """queued, running, completed, failed."""
    message: Mapped[str] = mapped_column(Text, default="")
    """Why it failed, for a person."""
    summary: Mapped[dict[str, Any] | None]
    """What `python -m grpo_engine replay` prints; its examples say `attempt` as well."""
    ended_at: Mapped[datetime | None]
    boot_id: Mapped[str | None] = mapped_column(String(40))
    pid: Mapped[int | None]
    process_started: Mapped[int | None] = mapped_column(BigInteger)
    """With the two before it: the web process that works on it."""
    beats: Mapped[int] = mapped_column(default=0, server_default="0")
    """Raised by that process while the replay is open."""
