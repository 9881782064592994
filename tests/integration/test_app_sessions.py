from __future__ import annotations

import logging

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy.orm import Session

from app import sessions
from app.db import Database
from app.models import User
from app.sessions import after_commit
from app.settings import Settings
from app.users import service as users
from app.users.service import create_user
from tests import seed
from tests.callers import bearer


def names(database: Database) -> list[str]:
    with database.read() as session:
        return [user.name for user in session.query(User)]


def test_after_commit_work_sees_the_commit_and_runs_once(any_database: Database) -> None:
    seen: list[list[str]] = []
    with any_database.write() as session:
        create_user(session, "grace", ["read"])
        after_commit(session, lambda: seen.append(names(any_database)))
        assert seen == []
    assert seen == [["grace"]]


def test_after_commit_work_is_dropped_with_the_transaction(database: Database) -> None:
    seen: list[int] = []
    with database.write() as session:
        create_user(session, "grace", ["read"])
        after_commit(session, lambda: seen.append(1))
        session.rollback()
    assert (seen, names(database)) == ([], [])


def test_after_commit_work_that_fails_is_logged_only(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), database.write() as session:
        create_user(session, "grace", ["read"])
        after_commit(session, lambda: 1 / 0)
    assert names(database) == ["grace"]
    assert "ZeroDivisionError" in caplog.text


def test_workers_are_told_when_and_only_when_a_run_is_queued(
    app: FastAPI, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Settings] = []
    monkeypatch.setattr(sessions, "send_work", told.append)
    body = {"config": seed.config().model_dump(mode="json")}
    client.post("/api/v1/runs", json={})
    client.post("/api/v1/runs", json=body, headers=bearer(app, ["read"]))
    assert told == []
    client.post("/api/v1/runs", json=body)
    client.post("/api/v1/runs/1/pause")
    assert told == [app.state.settings]
    client.post("/api/v1/runs/1/resume")
    assert len(told) == 2


def test_a_bug_shows_nothing_of_itself(app: FastAPI, caplog: pytest.LogCaptureFixture) -> None:
    @app.get("/api/v1/broken")
    def broken() -> None:
        raise RuntimeError("the secret of the house")

    with TestClient(app, raise_server_exceptions=False) as client:
        answer = client.get("/api/v1/broken")
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/problem+json"
    assert "secret" not in answer.text
    assert "the secret of the house" in caplog.text


def test_a_browser_gets_a_page_and_a_program_a_problem(seeded: TestClient) -> None:
    page = seeded.get("/runs/999", headers={"Accept": "text/html"})
    assert page.status_code == 404
    assert page.headers["content-type"].startswith("text/html")
    problem = seeded.get("/api/v1/runs/999", headers={"Accept": "text/html"})
    assert problem.json()["detail"] == "There is no run 999."


def test_a_page_that_needs_a_user_leads_to_the_login(app: FastAPI) -> None:
    with TestClient(app, follow_redirects=False) as nobody:
        answer = nobody.get("/runs?state=running", headers={"Accept": "text/html"})
    assert answer.status_code == 303
    assert answer.headers["location"] == "/login?next=/runs%3Fstate%3Drunning"


def test_the_second_of_two_equal_writes_is_a_conflict_not_a_fault(
    app: FastAPI, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_late(session: Session, name: str, *_: object) -> None:
        """The loser of a race: it looked before the winner's commit."""
        session.add(User(name=name, permissions=[]))
        session.flush()

    body = {"name": "grace", "permissions": ["read"]}
    assert client.post("/api/v1/users", json=body).status_code == 201
    monkeypatch.setattr(users, "create_user", too_late)
    answer = client.post("/api/v1/users", json=body)
    assert answer.status_code == 409
    assert "at the same moment" in answer.json()["detail"]
