"""Who calls the application in tests: a program with a bearer token, a browser with cookie and CSRF token."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI, Request, Response
from fastapi.testclient import TestClient

from app.models import User
from app.security import COOKIE, CSRF_HEADER, csrf_token, sign_in
from app.users.service import create_token, create_user, ensure_first_user, list_users


def make_user(app: FastAPI, permissions: Sequence[str] | None = None) -> User:
    """The first local user, or a new one with these permissions."""
    with app.state.database.write() as session:
        first = ensure_first_user(session)
        if permissions is None:
            return first
        return create_user(session, f"user{len(list_users(session))}", permissions)


def bearer(app: FastAPI, permissions: Sequence[str] | None = None) -> dict[str, str]:
    """Headers of a program that acts for this user."""
    user = make_user(app, permissions)
    with app.state.database.write() as session:
        return {"Authorization": f"Bearer {create_token(session, user, 'test')[1]}"}


def browser(app: FastAPI, user: User | None = None, *, csrf: bool = True) -> TestClient:
    """Signed in by cookie; without `csrf` its writes carry no CSRF token."""
    response = Response()
    sign_in(_request(app), response, user or make_user(app))
    cookie = response.headers["set-cookie"].partition(";")[0].partition("=")[2]
    client = TestClient(app, cookies={COOKIE: cookie})
    if csrf:
        client.headers[CSRF_HEADER] = csrf_token(_request(app, f"{COOKIE}={cookie}"))
    return client


def _request(app: FastAPI, cookie: str = "") -> Request:
    scope = {"type": "http", "app": app, "scheme": "http", "path": "/", "query_string": b"", "server": ("test", 80)}
    return Request({**scope, "headers": [(b"cookie", cookie.encode())]})
