"""Named, versioned configs and registered reward sources."""

from __future__ import annotations

import uuid
from typing import Any

from sqlalchemy import ForeignKey, String, Text, UniqueConstraint
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
