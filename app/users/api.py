"""REST: who am I, users, API tokens, login links."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter

from app.idempotency import ApiRoute
from app.models import ApiToken, User
from app.security import Admin, CurrentUser
from app.sessions import AppSettings, ReadSession, WriteSession
from app.users import service
from app.users.schemas import (
    LoginLinkOut,
    NewTokenOut,
    PasswordIn,
    PermissionsIn,
    TokenIn,
    TokenOut,
    TokensOut,
    UserIn,
    UserOut,
    UsersOut,
)

router = APIRouter(tags=["users"], route_class=ApiRoute)


@router.get("/me", response_model=UserOut)
def me(user: CurrentUser) -> User:
    """The user behind this request."""
    return user


@router.put("/me/password", status_code=204)
def change_my_password(user: CurrentUser, body: PasswordIn, session: WriteSession) -> None:
    """Set your password; every browser session of yours ends."""
    service.set_password(session, user, body.password)


@router.get("/tokens", response_model=TokensOut)
def list_tokens(user: CurrentUser, session: ReadSession) -> dict[str, Any]:
    """Your API tokens, revoked ones included."""
    return {"items": service.list_tokens(session, user)}


@router.post("/tokens", status_code=201)
def create_token(user: CurrentUser, body: TokenIn, session: WriteSession) -> NewTokenOut:
    """Make an API token with your permissions. The token is shown once."""
    row, token = service.create_token(session, user, body.name)
    return NewTokenOut(**TokenOut.model_validate(row).model_dump(), token=token)


@router.delete("/tokens/{token_id}", response_model=TokenOut)
def revoke_token(token_id: uuid.UUID, user: CurrentUser, session: WriteSession) -> ApiToken:
    """Revoke one of your tokens; it stays in the list."""
    return service.revoke_token(session, user, token_id)


@router.get("/users", response_model=UsersOut)
def list_users(_: Admin, session: ReadSession) -> dict[str, Any]:
    return {"items": service.list_users(session)}


@router.post("/users", status_code=201, response_model=UserOut)
def create_user(_: Admin, body: UserIn, session: WriteSession) -> User:
    """Create a user; without a password only a login link signs them in."""
    return service.create_user(session, body.name, body.permissions, body.password)


@router.patch("/users/{user_id}", response_model=UserOut)
def set_permissions(_: Admin, user_id: uuid.UUID, body: PermissionsIn, session: WriteSession) -> User:
    user = service.get_user(session, user_id)
    service.set_permissions(session, user, body.permissions)
    return user


@router.post("/users/{user_id}/login-links", status_code=201)
def make_login_link(_: Admin, user_id: uuid.UUID, session: WriteSession, settings: AppSettings) -> LoginLinkOut:
    """A link that signs the user in once, within 15 minutes."""
    secret = service.make_login_link(session, service.get_user(session, user_id))
    return LoginLinkOut(url=service.login_url(settings, secret))
