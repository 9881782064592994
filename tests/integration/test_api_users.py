from __future__ import annotations

import stat
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import SecretStr

from app.db import Database
from app.errors import Conflict, Invalid, NotSignedIn, TooManyRequests
from app.models import LoginLink, User, utc_now
from app.security import UnsafeBind, check_bind, digest, is_loopback, load_secret_key
from app.settings import Settings
from app.users import service
from tests.callers import bearer, browser, make_user

PASSWORD = "four random words here"


def test_the_first_user_may_do_everything_and_is_made_once(any_database: Database) -> None:
    with any_database.write() as session:
        first = service.ensure_first_user(session)
        assert first.permissions == ["read", "run", "code", "admin"]
        assert service.ensure_first_user(session).id == first.id
        assert first.password_hash is None


# ---------------------------------------------------------------- tokens
def test_a_token_is_shown_once_and_kept_as_a_hash(client: TestClient, app: FastAPI) -> None:
    made = client.post("/api/v1/tokens", json={"name": "laptop"}).json()
    listed = client.get("/api/v1/tokens").json()["items"]
    assert made["token"].startswith(made["prefix"])
    assert all("token" not in token for token in listed)
    home: Path = app.state.settings.home
    stored = b"".join(path.read_bytes() for path in home.glob("cohort.db*"))
    assert made["token"].encode() not in stored
    assert digest(made["token"]).encode() in stored


def test_a_revoked_token_opens_nothing(client: TestClient, app: FastAPI) -> None:
    made = client.post("/api/v1/tokens", json={"name": "laptop"}).json()
    headers = {"Authorization": f"Bearer {made['token']}"}
    assert client.get("/api/v1/me", headers=headers).json()["name"] == "admin"
    assert client.delete(f"/api/v1/tokens/{made['id']}").json()["revoked_at"]
    assert client.get("/api/v1/me", headers=headers).status_code == 401
    other = bearer(app, ["read"])
    assert client.delete(f"/api/v1/tokens/{made['id']}", headers=other).status_code == 404


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer ", "Bearer nonsense", "Basic YTpi", "Bearer cht_é"])
def test_no_other_authorization_opens_anything(app: FastAPI, value: str) -> None:
    with TestClient(app) as nobody:
        answer = nobody.get("/api/v1/me", headers={b"Authorization": value.encode()})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"


def test_only_an_admin_makes_users(client: TestClient, app: FastAPI) -> None:
    body = {"name": "grace", "permissions": ["run", "read"]}
    assert client.post("/api/v1/users", json=body).json()["permissions"] == ["read", "run"]
    assert client.post("/api/v1/users", json=body).status_code == 409
    unknown = client.post("/api/v1/users", json={"name": "eve", "permissions": ["root"]})
    assert unknown.json()["errors"][0]["value"] == "root"
    others = bearer(app, ["read", "run", "code"])
    assert client.post("/api/v1/users", json={**body, "name": "eve"}, headers=others).status_code == 403
    assert client.get("/api/v1/users", headers=others).status_code == 403


def test_the_last_admin_stays_one(client: TestClient) -> None:
    me = client.get("/api/v1/me").json()
    assert client.patch(f"/api/v1/users/{me['id']}", json={"permissions": ["read"]}).status_code == 409


def test_registering_a_reward_needs_the_code_permission(client: TestClient, app: FastAPI) -> None:
    body = {"name": "exact", "source": "def reward(completions, **columns):\n    return [0.0]\n"}
    refused = client.post("/api/v1/rewards", json=body, headers=bearer(app, ["read", "run", "admin"]))
    assert refused.status_code == 403
    assert "`code`" in refused.json()["detail"]
    assert client.post("/api/v1/rewards", json=body).status_code == 201


@pytest.mark.parametrize(
    ("name", "source", "field"),
    [
        ("../etc", "def reward(completions): return []", "name"),
        ("Exact", "def reward(completions): return []", "name"),
        ("exact", "def reward(:", "source"),
        ("exact", "import os", "source"),
        ("exact", "def _hidden(completions): return []", "source"),
        ("exact", "\x00", "source"),
    ],
)
def test_source_that_is_no_reward_is_refused(client: TestClient, name: str, source: str, field: str) -> None:
    answer = client.post("/api/v1/rewards", json={"name": name, "source": source})
    assert answer.status_code == 422
    assert [entry["field"] for entry in answer.json()["errors"]] == [field]


def test_registered_source_is_never_executed(client: TestClient, tmp_path: Path) -> None:
    trap = f"open({str(tmp_path / 'ran')!r}, 'w')\ndef reward(completions, **columns):\n    return []\n"
    assert client.post("/api/v1/rewards", json={"name": "trap", "source": trap}).status_code == 201
    assert not (tmp_path / "ran").exists()


# ---------------------------------------------------------------- cookies and passwords
def test_a_browser_with_its_csrf_token_may_write(app: FastAPI) -> None:
    page = browser(app)
    assert page.post("/api/v1/tokens", json={"name": "from the page"}).status_code == 201


def test_a_csrf_token_of_another_session_is_refused(app: FastAPI) -> None:
    mine, other = browser(app), browser(app)
    answer = mine.post("/api/v1/tokens", json={"name": "x"}, headers={"X-CSRF-Token": other.headers["X-CSRF-Token"]})
    assert answer.status_code == 403


def test_a_changed_cookie_is_nobodys(app: FastAPI) -> None:
    page = browser(app)
    [(name, value)] = page.cookies.items()
    page.cookies.set(name, value[:-2] + ("AA" if value[-2:] != "AA" else "BB"))
    assert page.get("/api/v1/me").status_code == 401


def test_a_new_password_ends_every_session(app: FastAPI) -> None:
    page = browser(app)
    assert page.put("/api/v1/me/password", json={"password": "short"}).status_code == 422
    assert page.put("/api/v1/me/password", json={"password": PASSWORD}).status_code == 204
    assert page.get("/api/v1/me").status_code == 401


def test_name_and_password_sign_in(any_database: Database) -> None:
    with any_database.write() as session:
        service.create_user(session, "grace", ["read"], PASSWORD)
        assert service.authenticate(session, "grace", PASSWORD).name == "grace"
        messages = set()
        for name, password in (("grace", "wrong"), ("nobody", PASSWORD)):
            with pytest.raises(NotSignedIn) as refused:
                service.authenticate(session, name, password)
            messages.add(refused.value.detail)
        assert len(messages) == 1
        stored = session.query(User).filter_by(name="grace").one().password_hash
    assert stored is not None
    assert stored.startswith("$argon2id$")


def test_a_user_without_password_cannot_sign_in_with_one(database: Database) -> None:
    with database.write() as session:
        service.ensure_first_user(session)
        for guess in ("", "admin"):
            with pytest.raises(NotSignedIn):
                service.authenticate(session, "admin", guess, client=f"other {guess}")


def test_failed_logins_are_limited_and_forgiven_with_time() -> None:
    now = [0.0]
    limiter = service.FailureLimiter(lambda: now[0])
    for _ in range(service.MAX_FAILURES):
        limiter.check("grace")
        limiter.failed("grace")
    with pytest.raises(TooManyRequests) as limited:
        limiter.check("grace")
    assert int(limited.value.headers["Retry-After"]) > 0
    limiter.check("someone else")
    now[0] += service.FAILURE_WINDOW_S
    limiter.check("grace")


# ---------------------------------------------------------------- login links
def test_a_login_link_works_once(any_database: Database) -> None:
    with any_database.write() as session:
        secret = service.make_login_link(session, service.ensure_first_user(session))
    with any_database.write() as session:
        assert service.use_login_link(session, secret).name == "admin"
    with any_database.write() as session, pytest.raises(NotSignedIn, match="used or has expired"):
        service.use_login_link(session, secret)


def test_an_old_or_invented_login_link_does_not_work(database: Database) -> None:
    with database.write() as session:
        secret = service.make_login_link(session, service.ensure_first_user(session))
        session.query(LoginLink).update({"expires_at": utc_now() - timedelta(seconds=1)})
        for wrong in (secret, "x" * 43, ""):
            with pytest.raises(NotSignedIn):
                service.use_login_link(session, wrong)


def test_the_address_of_a_link_names_host_and_port() -> None:
    assert service.login_url(Settings(port=9000), "abc") == "http://127.0.0.1:9000/login/abc"
    assert service.login_url(Settings(host="::1"), "abc") == "http://[::1]:8000/login/abc"


# ---------------------------------------------------------------- key and binding
def test_the_secret_key_is_made_once_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    key = load_secret_key(settings)
    assert len(key) == 64
    assert load_secret_key(settings) == key
    assert stat.S_IMODE((tmp_path / "home" / "secret_key").stat().st_mode) == 0o600
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["secret_key"]
    assert load_secret_key(Settings(secret_key=SecretStr("given"))) == b"given"


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("127.8.8.8", True), ("0.0.0.0", False),
     ("::", False), ("192.168.1.2", False), ("example.test", False), ("", False)],
)  # fmt: skip
def test_what_counts_as_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_nobody_opens_the_house_to_others_without_a_password(settings: Settings, database: Database) -> None:
    public: Any = settings.model_copy(update={"host": "0.0.0.0"})
    check_bind(settings, database)
    with database.write() as session:
        user = service.ensure_first_user(session)
    with pytest.raises(UnsafeBind, match=r"COHORT_HOST=0\.0\.0\.0"):
        check_bind(public, database)
    with database.write() as session:
        service.set_password(session, user, PASSWORD)
    check_bind(public, database)


def test_permissions_and_passwords_are_checked_where_they_are_set(database: Database, app: FastAPI) -> None:
    user = make_user(app)
    with database.write() as session, pytest.raises(Invalid, match="password"):
        service.set_password(session, user, "short")
    with database.write() as session, pytest.raises(Conflict):
        service.set_permissions(session, user, ["read"])
