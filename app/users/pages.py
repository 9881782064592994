"""Pages: log in by password or link, settings with API tokens, password and theme."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Form, Request
from fastapi.responses import Response

from app.errors import AppError, Invalid
from app.models import ApiToken, User
from app.security import CurrentUser, MaybeUser, Reader, sign_in, sign_out
from app.sessions import ReadSession, WriteSession
from app.users import service
from app.web import page, pages_router, redirect

open_router = APIRouter(include_in_schema=False)
router = APIRouter()
inside = pages_router()


# ---------------------------------------------------------------- login
@dataclass(frozen=True)
class LoginContext:
    name: str
    next: str
    error: str


@dataclass(frozen=True)
class LinkContext:
    action: str
    error: str


@open_router.get("/")
def home() -> Response:
    return redirect("/runs")


@open_router.get("/login")
def login_form(request: Request, user: MaybeUser, next: str = "/runs") -> Response:
    if user is not None:
        return redirect(_inside(next))
    return page(request, "login/login.html", LoginContext("admin", _inside(next), ""))


@open_router.post("/login")
def login(
    request: Request,
    session: ReadSession,
    name: Annotated[str, Form()],
    password: Annotated[str, Form()],
    next: Annotated[str, Form()] = "/runs",
) -> Response:
    try:
        user = service.authenticate(session, name, password, client=request.client.host if request.client else "")
    except AppError as error:
        context = LoginContext(name, _inside(next), error.detail)
        return page(request, "login/login.html", context, status=error.status)
    response = redirect(_inside(next))
    sign_in(request, response, user)
    return response


@open_router.get("/login/{secret}")
def login_link(request: Request, secret: str) -> Response:
    """A page with a button: opening a link changes nothing, so a mail scanner cannot use it up."""
    return page(request, "login/link.html", LinkContext(f"/login/{secret}", ""))


@open_router.post("/login/{secret}")
def use_login_link(request: Request, secret: str, session: WriteSession) -> Response:
    try:
        user = service.use_login_link(session, secret)
    except AppError as error:
        return page(request, "login/link.html", LinkContext("", error.detail), status=error.status)
    response = redirect("/runs")
    sign_in(request, response, user)
    return response


@inside.post("/logout")
def logout() -> Response:
    response = redirect("/login", "You are logged out.")
    sign_out(response)
    return response


def _inside(url: str) -> str:
    """Only a path of this site is followed after the login."""
    return url if url.startswith("/") and not url.startswith(("//", "/\\")) else "/runs"


# ---------------------------------------------------------------- settings
@dataclass(frozen=True)
class SettingsContext:
    user: User
    tokens: list[ApiToken]
    new_token: str
    """Shown once, right after it was made."""
    token_error: str
    password_error: str
    has_password: bool


@inside.get("/settings")
def settings_page(request: Request, user: Reader, session: ReadSession) -> Response:
    return page(request, "settings/settings.html", _context(session, user))


def _context(
    session: ReadSession, user: User, new_token: str = "", token_error: str = "", password_error: str = ""
) -> SettingsContext:
    tokens = [token for token in service.list_tokens(session, user) if token.revoked_at is None]
    return SettingsContext(user, tokens, new_token, token_error, password_error, user.password_hash is not None)


@inside.post("/settings/tokens")
def create_token(
    request: Request, user: CurrentUser, session: WriteSession, name: Annotated[str, Form()] = ""
) -> Response:
    if not name.strip() or len(name) > 100:
        context = _context(session, user, token_error="Give the token a name of 1 to 100 characters.")
        return page(request, "settings/settings.html", context, status=422)
    _, token = service.create_token(session, user, name.strip())
    return page(request, "settings/settings.html", _context(session, user, new_token=token), status=201)


@inside.post("/settings/tokens/{token_id}/revoke")
def revoke_token(user: CurrentUser, session: WriteSession, token_id: uuid.UUID) -> Response:
    token = service.revoke_token(session, user, token_id)
    return redirect("/settings", f"The token {token.name} no longer works.")


@inside.post("/settings/password")
def change_password(
    request: Request,
    user: CurrentUser,
    session: WriteSession,
    password: Annotated[str, Form()] = "",
    again: Annotated[str, Form()] = "",
) -> Response:
    try:
        if password != again:
            raise Invalid("The two entries differ.")
        service.set_password(session, user, password)
    except Invalid as error:
        text = "; ".join(f"{p.message}, {p.remedy}" for p in error.problems) or error.detail
        return page(request, "settings/settings.html", _context(session, user, password_error=text), status=422)
    fresh = service.get_user(session, user.id)
    response = redirect("/settings", "The password is set; other browsers are logged out.")
    sign_in(request, response, fresh)
    return response


router.include_router(open_router)
router.include_router(inside)
