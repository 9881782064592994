"""Stored rollouts scored again over REST and on the page."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from app.artifacts import open_store
from app.rewards import replays
from app.runs.service import get_run
from tests.callers import bearer, browser, make_user
from tests.waiting import wait_until

HTML = {"Accept": "text/html"}
ACCURACY = {"kind": "accuracy", "compare": "number"}
URL = "/api/v1/runs/1/replays"


def ended(client: TestClient, url: str) -> dict[str, Any]:
    wait_until(lambda: client.get(url).json()["state"] in ("completed", "failed"), 60, "the replay ends")
    answer: dict[str, Any] = client.get(url).json()
    return answer


def test_a_replay_is_queued_scored_and_told(seeded: TestClient) -> None:
    started = seeded.post(URL, json={"config": {"rewards": [ACCURACY, {"kind": "format", "weight": -2}]}})
    assert (started.status_code, started.json()["state"]) == (201, "queued")
    told = ended(seeded, f"{URL}/{started.json()['id']}")
    summary = told["summary"]
    assert (told["state"], told["message"], told["stage"]) == ("completed", "", "1-rl")
    assert (summary["num_batches"], summary["num_groups"]) == (24, 96)
    assert summary["sign_changed_share"] > 0.2
    assert summary["parts"]["format"]["old_versions"] == ["format@3f9a12c4"]
    assert {one["attempt"] for one in summary["examples"]} <= {1, 2}
    assert [row["id"] for row in seeded.get(URL).json()["items"]] == [started.json()["id"]]


def test_of_a_batch_that_two_attempts_wrote_the_newer_one_counts(seeded_app: FastAPI) -> None:
    with seeded_app.state.database.read() as session:
        views = replays.batches(session, get_run(session, 1), "1-rl")
    assert [view.batch for view in views] == list(range(1, 25))
    assert [view.attempt for view in views] == [1] * 8 + [2] * 16


@pytest.mark.parametrize(
    ("body", "word"),
    [({"config": {"rewards": [{"kind": "judge"}]}}, "needs a model"), ({"config_yaml": "- {"}, "line 1"),
     ({"config": {"rewards": [ACCURACY], "sandbox": {"tier": "unsafe"}}}, "no meaning"), ({}, "either config"),
     ({"config": {"rewards": [ACCURACY]}, "stage": "0-sft"}, "has no rollouts"),
     ({"config": {"rewards": [{"kind": "custom", "name": "x"}]}}, "not a registered")],
)  # fmt: skip
def test_what_cannot_be_scored_again_is_refused(body: dict[str, Any], word: str, seeded: TestClient) -> None:
    refused = seeded.post(URL, json=body)
    assert refused.status_code == 422
    assert word in refused.text


def test_a_config_that_only_the_engine_refuses_ends_failed_with_its_words(seeded: TestClient) -> None:
    started = seeded.post(URL, json={"config": {"rewards": [{"kind": "accuracy", "gated_by": "taste"}]}}).json()
    told = ended(seeded, f"{URL}/{started['id']}")
    assert told["state"] == "failed"
    assert "no other part" in told["message"]


def test_a_replay_past_its_limit_is_ended(seeded_app: FastAPI, seeded: TestClient) -> None:
    source = "import time\ndef reward(completions, **columns):\n    time.sleep(600)\n"
    seeded.post("/api/v1/rewards", json={"name": "hangs", "source": source})
    seeded_app.state.settings = seeded_app.state.settings.model_copy(update={"replay_limit_s": 1.5})
    started = seeded.post(URL, json={"config": {"rewards": [{"kind": "custom", "name": "hangs"}]}}).json()
    assert "longer than 1.5 s" in ended(seeded, f"{URL}/{started['id']}")["message"]


def test_who_may_not_run_or_execute_code_may_not_replay(seeded_app: FastAPI, seeded: TestClient) -> None:
    seeded.post("/api/v1/rewards", json={"name": "own", "source": "def reward(completions): return [1]"})
    custom = {"config": {"rewards": [{"kind": "custom", "name": "own"}]}}
    assert seeded.post(URL, json=custom, headers=bearer(seeded_app, ["read", "run"])).status_code == 403
    plain = {"config": {"rewards": [ACCURACY]}}
    assert seeded.post(URL, json=plain, headers=bearer(seeded_app, ["read"])).status_code == 403


def test_rollouts_that_are_gone_end_it_with_a_sentence(seeded_app: FastAPI, seeded: TestClient) -> None:
    with seeded_app.state.database.read() as session:
        [*_, last] = replays.batches(session, get_run(session, 1), "1-rl")
    local = open_store(seeded_app.state.settings).local_path(last.key)
    assert local is not None
    local.unlink()
    started = seeded.post(URL, json={"config": {"rewards": [ACCURACY]}}).json()
    assert "may have been removed" in ended(seeded, f"{URL}/{started['id']}")["message"]


def test_the_page_shows_what_would_have_changed(seeded_app: FastAPI) -> None:
    with browser(seeded_app) as client:
        assert "max_tokens: 64" in client.get("/runs/1/replays", headers=HTML).text
        refused = client.post("/runs/1/replays", data={"yaml": "rewards: [{kind: judge}]"}, headers=HTML)
        assert (refused.status_code, "needs a model" in refused.text) == (422, True)
        sent = {"yaml": "rewards: [{kind: accuracy, compare: number}]"}
        url = client.post("/runs/1/replays", data=sent, headers=HTML, follow_redirects=False).headers["location"]
        wait_until(lambda: "completed" in client.get(url, headers=HTML).text, 60, "the page shows the end")
        text = client.get(url, headers=HTML).text
        assert "rank correlation" in text
        link = re.search(r'href="(/runs/1/groups/[^"#]+)', text)
        assert link is not None
        assert client.get(link[1], headers=HTML).status_code == 200
    with browser(seeded_app, make_user(seeded_app, ["read"])) as reader:
        assert "needs the permission" in reader.get("/runs/1/replays", headers=HTML).text


def test_a_run_is_deleted_with_its_replays(seeded: TestClient) -> None:
    started = seeded.post(URL, json={"config": {"rewards": [ACCURACY]}}).json()
    ended(seeded, f"{URL}/{started['id']}")
    assert seeded.delete("/api/v1/runs/1").status_code == 204
    assert seeded.get(f"{URL}/{started['id']}").status_code == 404
