"""Who is calling and what they may do: session cookies, bearer tokens, CSRF tokens, permissions, where to bind.

A browser holds one signed, HttpOnly, SameSite=Lax cookie; every write it sends carries a CSRF token as header
X-CSRF-Token or form field csrf_token. A program sends `Authorization: Bearer <token>` and needs no CSRF token.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import secrets
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import Depends, Request, Response
from itsdangerous import BadSignature, URLSafeTimedSerializer
from sqlalchemy import select
from sqlalchemy.orm import Session

from app import idempotency
from app.db import Database
from app.errors import Forbidden, NotSignedIn
from app.models import ApiToken, User, utc_now
from app.settings import Settings

COOKIE = "cohort_session"
CSRF_HEADER = "X-CSRF-Token"
CSRF_FIELD = "csrf_token"
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
FORM_TYPES = ("application/x-www-form-urlencoded", "multipart/form-data")


class UnsafeBind(Exception):
    """The web application would be reachable by others while nobody has a password."""


# ---------------------------------------------------------------- the key
def load_secret_key(settings: Settings) -> bytes:
    """The configured key, else the one in <home>/secret_key, made on first use and readable by its owner only."""
    configured = settings.secret_key.get_secret_value()
    if configured:
        return configured.encode()
    path = settings.home / "secret_key"
    if not path.exists():
        _create_once(path, secrets.token_hex(32))
    return path.read_text().strip().encode()


def _create_once(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    try:
        os.link(aside, path)  # fails when another process was first; then its key counts
    except FileExistsError:
        pass
    finally:
        aside.unlink()


def digest(secret: str) -> str:
    """SHA-256 of a token or link secret (256 random bits need no slow hash)."""
    return hashlib.sha256(secret.encode()).hexdigest()


# ---------------------------------------------------------------- session cookie
def _signer(request: Request) -> URLSafeTimedSerializer:
    return URLSafeTimedSerializer(request.app.state.secret_key, salt="cohort-session")


def sign_in(request: Request, response: Response, user: User) -> None:
    """Give the browser a session of `user`."""
    settings: Settings = request.app.state.settings
    value = _signer(request).dumps({"u": user.id.hex, "e": user.session_epoch, "n": secrets.token_hex(16)})
    response.set_cookie(
        COOKIE,
        value if isinstance(value, str) else value.decode(),
        max_age=int(settings.session_hours * 3600),
        httponly=True,
        samesite="lax",
        secure=request.url.scheme == "https",
        path="/",
    )


def sign_out(response: Response) -> None:
    response.delete_cookie(COOKIE, path="/")


def _session_claims(request: Request) -> dict[str, Any] | None:
    cookie = request.cookies.get(COOKIE)
    if not cookie:
        return None
    settings: Settings = request.app.state.settings
    try:
        claims: dict[str, Any] = _signer(request).loads(cookie, max_age=int(settings.session_hours * 3600))
    except BadSignature:
        return None
    return claims


def csrf_token(request: Request) -> str:
    """The token that this browser session must send with every write; empty when there is no session."""
    claims = _session_claims(request)
    if claims is None:
        return ""
    return hmac.new(request.app.state.secret_key, b"csrf:" + str(claims["n"]).encode(), "sha256").hexdigest()


async def submitted_csrf(request: Request) -> str:
    """CSRF token as the request carries it."""
    if request.method in SAFE_METHODS:
        return ""
    header = request.headers.get(CSRF_HEADER)
    if header is not None:
        return header
    if request.headers.get("content-type", "").startswith(FORM_TYPES):
        field = (await request.form()).get(CSRF_FIELD)
        return field if isinstance(field, str) else ""
    return ""


# ---------------------------------------------------------------- the caller
@dataclass(frozen=True, slots=True)
class _Caller:
    user: User
    by_cookie: bool


def _caller(request: Request, session: Session) -> _Caller | None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        user = _user_of_token(session, token.strip())
        return _Caller(user, False) if user else None
    claims = _session_claims(request)
    user = session.get(User, uuid.UUID(claims["u"])) if claims else None
    if user is None or claims is None or user.session_epoch != claims["e"]:
        return None
    return _Caller(user, True)


def _user_of_token(session: Session, token: str) -> User | None:
    query = select(User).join(ApiToken, ApiToken.user_id == User.id)
    return session.scalar(query.where(ApiToken.token_hash == digest(token), ApiToken.revoked_at.is_(None)))


def signed_in(request: Request, csrf: Annotated[str, Depends(submitted_csrf)]) -> User:
    """The user behind the request. Raises NotSignedIn, or Forbidden when a browser's write lacks its CSRF token."""
    database: Database = request.app.state.database
    with database.read() as session:
        caller = _caller(request, session)
        if caller is None:
            raise NotSignedIn(
                "Sign in, or send a bearer token made by `cohort token create`.",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if request.method not in SAFE_METHODS:
            if caller.by_cookie and not hmac.compare_digest(csrf.encode(), csrf_token(request).encode()):
                raise Forbidden(f"The CSRF token is missing or old; reload the page (header {CSRF_HEADER}).")
            idempotency.replay_known(request, session, caller.user)
    if request.method not in SAFE_METHODS and not caller.by_cookie:
        _note_token_use(database, request)
    return caller.user


def _note_token_use(database: Database, request: Request) -> None:
    """Record that a token wrote; at most once a minute, and never for reads, which change nothing."""
    token = request.headers["authorization"].partition(" ")[2].strip()
    now = utc_now()
    with database.read() as session:
        last = session.scalar(select(ApiToken.last_used_at).where(ApiToken.token_hash == digest(token)))
    if last is None or now - last > timedelta(minutes=1):
        with database.write() as session:
            row = session.scalar(select(ApiToken).where(ApiToken.token_hash == digest(token)))
            if row is not None:
                row.last_used_at = now


def maybe_signed_in(request: Request) -> User | None:
    """The user behind a reading request, None when nobody is signed in."""
    database: Database = request.app.state.database
    with database.read() as session:
        caller = _caller(request, session)
    return caller.user if caller else None


CurrentUser = Annotated[User, Depends(signed_in)]
MaybeUser = Annotated[User | None, Depends(maybe_signed_in)]


def allowed(user: User, permission: str) -> bool:
    return permission in user.permissions


def check_permission(user: User, permission: str) -> None:
    """Raises Forbidden naming the permission that is missing."""
    if not allowed(user, permission):
        raise Forbidden(f"{user.name} lacks the permission `{permission}`; an admin can grant it.")


def require(permission: str) -> Callable[..., User]:
    """Dependency: the signed-in user, who must have `permission`.

    Example: @router.post("/runs", dependencies=[Depends(require("run"))])"""

    def dependency(user: CurrentUser) -> User:
        check_permission(user, permission)
        return user

    return dependency


Reader = Annotated[User, Depends(require("read"))]
Runner = Annotated[User, Depends(require("run"))]
Coder = Annotated[User, Depends(require("code"))]
Admin = Annotated[User, Depends(require("admin"))]


# ---------------------------------------------------------------- where requests come from
def is_cross_site(request: Request) -> bool:
    """A browser says that another site caused this request."""
    if request.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        return True
    origin = request.headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != request.headers.get("host", "")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_bind(settings: Settings, database: Database) -> None:
    """Raises UnsafeBind when others could reach the application and no user has a password."""
    if is_loopback(settings.host):
        return
    with database.read() as session:
        protected = session.scalar(select(User.id).where(User.password_hash.is_not(None)).limit(1))
    if protected is None:
        raise UnsafeBind(
            f"COHORT_HOST={settings.host} would open Cohort to others while no user has a password. "
            "Set one with `cohort user password admin`, or bind to 127.0.0.1."
        )
