"""Users, their passwords, API tokens and one-time login links."""

from __future__ import annotations

import secrets
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from app.errors import Conflict, Invalid, NotFound, NotSignedIn, TooManyRequests
from app.models import PERMISSIONS, ApiToken, LoginLink, User, utc_now
from app.security import digest
from app.settings import Settings
from grpo_engine.errors import Problem

MIN_PASSWORD_CHARACTERS = 10
MAX_FAILURES = 5
FAILURE_WINDOW_S = 300.0
TOKEN_PREFIX = "cht_"

_hasher = PasswordHasher()
_nobody = _hasher.hash(secrets.token_hex(16))
"""Verified against when the name is unknown, so that unknown names take as long as wrong passwords."""


class FailureLimiter:
    """Counts failed logins by key within a sliding window, in this process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: dict[str, list[float]] = defaultdict(list)

    def check(self, key: str) -> None:
        """Raises TooManyRequests after MAX_FAILURES in FAILURE_WINDOW_S."""
        now = self._clock()
        recent = [at for at in self._failures[key] if now - at < FAILURE_WINDOW_S]
        self._failures[key] = recent
        if len(recent) >= MAX_FAILURES:
            wait_s = int(FAILURE_WINDOW_S - (now - recent[0])) + 1
            detail = f"{MAX_FAILURES} failed logins; try again in {wait_s} s."
            raise TooManyRequests(detail, headers={"Retry-After": str(wait_s)})

    def failed(self, key: str) -> None:
        self._failures[key].append(self._clock())

    def succeeded(self, key: str) -> None:
        self._failures.pop(key, None)


login_failures = FailureLimiter()


# ---------------------------------------------------------------- users
def ensure_first_user(session: Session) -> User:
    """The first local user, `admin` with every permission; made when there is no user yet."""
    user = session.scalar(select(User).order_by(User.created_at).limit(1))
    return user or create_user(session, "admin", PERMISSIONS)


def create_user(session: Session, name: str, permissions: Sequence[str], password: str | None = None) -> User:
    """Raises Conflict when the name is taken, Invalid for an unknown permission or a short password."""
    if session.scalar(select(User.id).where(User.name == name)) is not None:
        raise Conflict(f"There is already a user {name}.")
    user = User(name=name, permissions=checked_permissions(permissions))
    session.add(user)
    session.flush()
    if password is not None:
        set_password(session, user, password)
    return user


def list_users(session: Session) -> list[User]:
    return list(session.scalars(select(User).order_by(User.name)))


def get_user(session: Session, user_id: uuid.UUID) -> User:
    user = session.get(User, user_id)
    if user is None:
        raise NotFound(f"There is no user {user_id}.")
    return user


def checked_permissions(permissions: Sequence[str]) -> list[str]:
    unknown = sorted(set(permissions) - set(PERMISSIONS))
    if unknown:
        problem = Problem("permissions", ", ".join(unknown), "is unknown", f"use some of {', '.join(PERMISSIONS)}")
        raise Invalid.of([problem])
    return [permission for permission in PERMISSIONS if permission in permissions]


def set_permissions(session: Session, user: User, permissions: Sequence[str]) -> None:
    """Raises Conflict when nobody would be left to administer."""
    admins = [other.id for other in list_users(session) if "admin" in other.permissions]
    if "admin" not in permissions and admins == [user.id]:
        raise Conflict(f"{user.name} is the only admin; give another user that permission first.")
    row = session.get_one(User, user.id)
    row.permissions = checked_permissions(permissions)
    session.flush()


def set_password(session: Session, user: User, password: str) -> None:
    """Set it and end every session of the user."""
    if len(password) < MIN_PASSWORD_CHARACTERS:
        message = f"has {len(password)} characters"
        raise Invalid.of(
            [Problem("password", "…", message, f"use {MIN_PASSWORD_CHARACTERS} or more, such as four random words")]
        )
    row = session.get_one(User, user.id)
    row.password_hash = _hasher.hash(password)
    row.session_epoch = (row.session_epoch or 0) + 1
    session.flush()


def sign_out_everywhere(session: Session, user: User) -> None:
    session.execute(update(User).where(User.id == user.id).values(session_epoch=User.session_epoch + 1))


def authenticate(session: Session, name: str, password: str, *, client: str = "") -> User:
    """The user with this password. Raises NotSignedIn without saying which of the two was wrong; TooManyRequests."""
    key = f"{client} {name}"
    login_failures.check(key)
    user = session.scalar(select(User).where(User.name == name))
    known = user.password_hash if user is not None and user.password_hash else _nobody
    try:
        _hasher.verify(known, password)
    except (VerificationError, InvalidHashError):
        user = None
    if user is None or known == _nobody:
        login_failures.failed(key)
        raise NotSignedIn("Name or password is wrong.")
    login_failures.succeeded(key)
    return user


# ---------------------------------------------------------------- tokens
def create_token(session: Session, user: User, name: str) -> tuple[ApiToken, str]:
    """The row and the token itself, which is shown once and kept as a hash."""
    token = TOKEN_PREFIX + secrets.token_urlsafe(32)
    row = ApiToken(user_id=user.id, name=name, token_hash=digest(token), prefix=token[:12])
    session.add(row)
    session.flush()
    return row, token


def list_tokens(session: Session, user: User) -> list[ApiToken]:
    return list(session.scalars(select(ApiToken).where(ApiToken.user_id == user.id).order_by(ApiToken.created_at)))


def revoke_token(session: Session, user: User, token_id: uuid.UUID) -> ApiToken:
    """Raises NotFound when it is not one of the user's tokens."""
    token = session.get(ApiToken, token_id)
    if token is None or token.user_id != user.id:
        raise NotFound(f"You have no token {token_id}.")
    token.revoked_at = token.revoked_at or utc_now()
    session.flush()
    return token


# ---------------------------------------------------------------- login links
def make_login_link(session: Session, user: User, *, minutes: float = 15) -> str:
    """Secret of a link that signs `user` in once; `login_url` makes the address."""
    secret = secrets.token_urlsafe(32)
    expires_at = utc_now() + timedelta(minutes=minutes)
    session.add(LoginLink(user_id=user.id, secret_hash=digest(secret), expires_at=expires_at))
    session.flush()
    return secret


def login_url(settings: Settings, secret: str) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{settings.port}/login/{secret}"


def use_login_link(session: Session, secret: str) -> User:
    """Use the link up and return its user. Raises NotSignedIn when it is unknown, used or expired."""
    now = utc_now()
    unused = (LoginLink.secret_hash == digest(secret), LoginLink.used_at.is_(None), LoginLink.expires_at > now)
    user_id = session.scalar(update(LoginLink).where(*unused).values(used_at=now).returning(LoginLink.user_id))
    if user_id is None:
        raise NotSignedIn("This login link was used or has expired; `cohort login` prints a new one.")
    return get_user(session, user_id)
