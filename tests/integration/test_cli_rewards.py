"""`cohort rewards …` as typed, against the application itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from app.cli import rewards
from app.client import CohortClient
from tests.callers import bearer
from tests.typed import Typed

SOURCE = "def reward(completions, **columns):\n    return [0.5 for _ in completions]\n"


@pytest.fixture
def house(seeded_app: FastAPI, seeded: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands talk to the seeded application."""
    token = bearer(seeded_app)["Authorization"].removeprefix("Bearer ")

    def handle(request: httpx.Request) -> httpx.Response:
        answer = seeded.request(request.method, str(request.url), content=request.content, headers=request.headers)
        return httpx.Response(answer.status_code, content=answer.content)

    @contextmanager
    def client() -> Iterator[CohortClient]:
        yield CohortClient("http://testserver", token, transport=httpx.MockTransport(handle))

    monkeypatch.setattr(rewards, "client", client)


def test_a_function_is_registered_listed_and_shown(house: None, typed: Typed, tmp_path: Path) -> None:
    assert "no reward function yet" in typed("rewards", "list")[1]
    (tmp_path / "half.py").write_text(SOURCE)
    status, output, _ = typed("rewards", "register", str(tmp_path / "half.py"))
    assert (status, output[:22]) == (0, "half is registered as ")
    assert output.split()[-1].rstrip(".") in typed("rewards", "list")[1]
    assert typed("rewards", "show", "half")[1] == SOURCE
    assert typed("rewards", "register", str(tmp_path / "none.py"))[0] == 1


def test_a_replay_is_followed_and_told(house: None, typed: Typed, tmp_path: Path) -> None:
    new = tmp_path / "new.yaml"
    new.write_text("rewards: [{kind: accuracy, compare: number}]\n")
    status, output, _ = typed("rewards", "replay", "1", "--config", str(new))
    assert status == 0
    assert "384 completions in 96 groups of 1-rl scored again" in output
    assert "rank correlation within groups" in output
    assert "/runs/1/replays/" in output
    told = json.loads(typed("rewards", "replay", "1", "--config", str(new), "--json")[1])
    assert told["num_batches"] == 24


def test_what_the_engine_refuses_is_the_commands_message(house: None, typed: Typed, tmp_path: Path) -> None:
    (tmp_path / "new.yaml").write_text("rewards: [{kind: accuracy, gated_by: taste}]\n")
    status, _, shown = typed("rewards", "replay", "1", "--config", str(tmp_path / "new.yaml"))
    assert status == 1
    assert "no other part" in shown
