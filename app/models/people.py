"""Who may do what: users with a permission set, API tokens, one-time login links, idempotency keys."""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any

from sqlalchemy import ForeignKey, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from app.models.base import Base, WithCreation, WithId

PERMISSIONS = ("read", "run", "code", "admin")
"""read: see everything; run: launch and control runs; code: register reward source; admin: users, workers, settings."""


class User(WithId, WithCreation, Base):
    __tablename__ = "users"

    name: Mapped[str] = mapped_column(String(100), unique=True)
    password_hash: Mapped[str | None] = mapped_column(String(200))
    """argon2; None until a password is set (login link only)."""
    permissions: Mapped[list[str]]
    session_epoch: Mapped[int] = mapped_column(default=0)
    """Part of every session cookie; raising it logs the user out everywhere."""


class ApiToken(WithId, WithCreation, Base):
    __tablename__ = "api_tokens"

    user_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("users.id"), index=True)
    name: Mapped[str] = mapped_column(String(100))
    token_hash: Mapped[str] = mapped_column(String(64), unique=True)
    """SHA-256 of the token, which is shown once."""
    prefix: Mapped[str] = mapped_column(String(12))
    last_used_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class LoginLink(WithId, WithCreation, Base):
    __tablename__ = "login_links"

    user_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("users.id"))
    secret_hash: Mapped[str] = mapped_column(String(64), unique=True)
    expires_at: Mapped[datetime]
    used_at: Mapped[datetime | None]


class IdempotencyKey(WithCreation, Base):
    """The first answer to a POST, given again to every repeat with the same key and body."""

    __tablename__ = "idempotency_keys"
    __table_args__ = (UniqueConstraint("user_id", "key"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    user_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("users.id"))
    key: Mapped[str] = mapped_column(String(200))
    request_hash: Mapped[str] = mapped_column(String(64))
    """SHA-256 of method, path and body."""
    status: Mapped[int]
    body: Mapped[dict[str, Any] | None]
