from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import func, select

from app.models import ApiToken, IdempotencyKey, Run
from app.settings import Settings
from tests import seed
from tests.applications import application
from tests.callers import bearer

BODY = {"config": seed.config().model_dump(mode="json")}
KEY = {"Idempotency-Key": "a-key"}


def count(client: TestClient, table: type) -> int:
    app: Any = client.app
    with app.state.database.read() as session:
        return int(session.scalar(select(func.count()).select_from(table)))


def test_the_same_key_and_body_give_the_same_answer_and_one_run(any_client: TestClient) -> None:
    first = any_client.post("/api/v1/runs", json=BODY, headers=KEY)
    again = any_client.post("/api/v1/runs", json=BODY, headers=KEY)
    assert (again.status_code, again.json()) == (201, first.json())
    assert again.headers["idempotency-replayed"] == "true"
    assert count(any_client, Run) == 1
    other = any_client.post("/api/v1/runs", json=BODY, headers={"Idempotency-Key": "another"})
    assert other.json()["number"] == 2


def test_the_same_key_with_another_body_is_refused(any_client: TestClient) -> None:
    any_client.post("/api/v1/runs", json=BODY, headers=KEY)
    answer = any_client.post("/api/v1/runs", json={**BODY, "tags": ["other"]}, headers=KEY)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "Idempotency-Key"
    assert any_client.post("/api/v1/runs/1/cancel", headers=KEY).status_code == 422
    assert count(any_client, Run) == 1


def test_a_refused_request_does_not_use_up_its_key(client: TestClient) -> None:
    assert client.post("/api/v1/runs", json={}, headers=KEY).status_code == 422
    assert count(client, IdempotencyKey) == 0
    assert client.post("/api/v1/runs", json=BODY, headers=KEY).status_code == 201


def test_a_repeated_cancel_is_answered_though_the_state_has_changed(any_client: TestClient) -> None:
    any_client.post("/api/v1/runs", json=BODY)
    answers = [any_client.post("/api/v1/runs/1/cancel", headers=KEY) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [202, 202]
    assert any_client.post("/api/v1/runs/1/cancel").status_code == 409


def test_keys_belong_to_their_user(client: TestClient, app: FastAPI) -> None:
    client.post("/api/v1/runs", json=BODY, headers=KEY)
    other = client.post("/api/v1/runs", json=BODY, headers={**KEY, **bearer(app, ["read", "run"])})
    assert other.json()["number"] == 2


def test_a_key_of_someone_who_may_not_gives_nothing_away(client: TestClient, app: FastAPI) -> None:
    client.post("/api/v1/runs", json=BODY, headers=KEY)
    reader = bearer(app, ["read"])
    assert client.post("/api/v1/runs", json=BODY, headers={**KEY, **reader}).status_code == 403


def test_a_secret_is_not_kept_for_repeats(client: TestClient) -> None:
    first = client.post("/api/v1/tokens", json={"name": "laptop"}, headers=KEY).json()
    again = client.post("/api/v1/tokens", json={"name": "laptop"}, headers=KEY).json()
    assert first["token"]
    assert again == {**first, "token": None}
    assert count(client, ApiToken) == 2


def test_posts_that_only_compute_repeat_their_first_answer_too(seeded: TestClient) -> None:
    checkpoint = seeded.get("/api/v1/checkpoints", params={"run": 1}).json()["items"][0]["id"]
    answers = [seeded.post(f"/api/v1/checkpoints/{checkpoint}/verify", headers=KEY) for _ in range(2)]
    assert answers[0].json() == answers[1].json()
    assert answers[1].headers["idempotency-replayed"] == "true"


@pytest.mark.parametrize("key", ["", "x" * 201])
def test_a_key_of_no_use_is_refused(client: TestClient, key: str) -> None:
    assert client.post("/api/v1/runs", json=BODY, headers={"Idempotency-Key": key}).status_code == 400


def test_twins_sent_at_once_make_one_run(any_settings: Settings) -> None:
    app = application(any_settings)
    client = TestClient(app, headers={**KEY, **bearer(app)})
    ready = threading.Barrier(6)

    def send(_: int) -> int:
        ready.wait()
        return client.post("/api/v1/runs", json=BODY).status_code

    with ThreadPoolExecutor(6) as pool:
        statuses = list(pool.map(send, range(6)))
    assert set(statuses) <= {201, 409}
    assert 201 in statuses
    assert count(client, Run) == 1
    app.state.database.dispose()
