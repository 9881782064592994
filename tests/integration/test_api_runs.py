from __future__ import annotations

from typing import Any

import pytest
import yaml
from fastapi import FastAPI
from fastapi.testclient import TestClient

from app.db import Database
from app.models import Run
from app.runs.states import TERMINAL_STATES
from tests import seed
from tests.callers import bearer
from tests.rows import add_run

CONFIG = seed.config().model_dump(mode="json")


def start(client: TestClient, **changes: Any) -> dict[str, Any]:
    answer = client.post("/api/v1/runs", json={"config": {**CONFIG, **changes}})
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def walk(client: TestClient, path: str, between: Any = None, **params: Any) -> list[dict[str, Any]]:
    """All items of all pages; `between` is called after each page."""
    items: list[dict[str, Any]] = []
    while True:
        page = client.get(path, params=params).json()
        items += page["items"]
        if page["next_cursor"] is None:
            return items
        params["cursor"] = page["next_cursor"]
        if between:
            between()


def test_a_run_started_from_a_config_waits_for_a_worker(any_client: TestClient) -> None:
    run = start(any_client, name="first", tags=["a"])
    assert (run["number"], run["state"], run["stage"], run["total_steps"]) == (1, "queued", "0-sft", 54)
    detail = any_client.get("/api/v1/runs/1").json()
    assert detail["config"]["name"] == "first"
    assert detail["id"] == run["id"]
    assert any_client.get(f"/api/v1/runs/{run['id']}").json() == detail
    told = any_client.get("/api/v1/runs/1/transitions").json()["items"]
    assert [(step["source"], step["target"], step["actor"]) for step in told] == [(None, "queued", "admin")]


def test_yaml_names_and_tags_start_runs_too(client: TestClient) -> None:
    client.post("/api/v1/configs", json={"name": "kept", "config": CONFIG})
    by_name = client.post("/api/v1/runs", json={"config_name": "kept", "tags": ["extra", "demo"]}).json()
    assert by_name["tags"] == ["demo", "seeded", "extra"]
    by_text = client.post("/api/v1/runs", json={"config_yaml": yaml.safe_dump(CONFIG)}).json()
    assert by_text["config_hash"] == seed.config().hash()


@pytest.mark.parametrize("body", [{}, {"config": {}, "config_yaml": "a"}, {"config": {}, "unknown": 1}])
def test_a_run_needs_exactly_one_config(client: TestClient, body: dict[str, Any]) -> None:
    answer = client.post("/api/v1/runs", json=body)
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"


def test_a_config_that_cannot_work_is_refused_field_by_field(client: TestClient) -> None:
    stages = [CONFIG["stages"][0], {**CONFIG["stages"][1], "group_size": 1, "grup_size": 2}]
    problem = client.post("/api/v1/runs", json={"config": {**CONFIG, "stages": stages}}).json()
    assert problem["status"] == 422
    found = {entry["field"]: entry for entry in problem["errors"]}
    assert {"stages.1.group_size", "stages.1.grup_size"} <= set(found)
    assert found["stages.1.group_size"]["value"] == "1"
    assert all(entry["message"] and entry["remedy"] for entry in problem["errors"])
    assert client.get("/api/v1/runs").json()["items"] == []


def test_a_custom_reward_must_be_registered_by_name(client: TestClient, app: FastAPI) -> None:
    custom = [{"kind": "custom", "name": "exact"}]
    stages = [CONFIG["stages"][0], {**CONFIG["stages"][1], "rewards": custom}]
    body = {"config": {**CONFIG, "stages": stages}}
    refused = client.post("/api/v1/runs", json=body).json()
    assert refused["errors"][0]["field"] == "stages.1.rewards.0.name"
    source = {"name": "exact", "source": "def reward(completions, **columns):\n    return [1.0 for _ in completions]\n"}
    kept = client.post("/api/v1/rewards", json=source).json()
    run = client.post("/api/v1/runs", json=body).json()
    assert client.get(f"/api/v1/runs/{run['id']}").json()["reward_sources"] == {"exact": kept["hash"]}


# ---------------------------------------------------------------- lists
def test_runs_are_filtered_by_state_tag_and_text(any_client: TestClient) -> None:
    start(any_client, name="Alpha", tags=["x", "50%"])
    start(any_client, name="beta", tags=["xy", 'quo"te'])
    any_client.post("/api/v1/runs/2/cancel")

    def names(**params: Any) -> list[str]:
        return [run["name"] for run in any_client.get("/api/v1/runs", params=params).json()["items"]]

    assert names() == ["beta", "Alpha"]
    assert names(state="queued") == ["Alpha"]
    assert names(state=["queued", "cancelled"]) == ["beta", "Alpha"]
    assert names(tag="x") == ["Alpha"]
    assert names(tag='quo"te') == ["beta"]
    assert names(text="ALPH") == ["Alpha"]
    assert names(text="50%") == ["Alpha"]
    assert names(text="5_%") == []


@pytest.mark.parametrize("sort", ["number", "-number", "name", "-last_reward", "last_reward", "started_at", "-state"])
def test_walking_all_pages_yields_each_run_once_while_others_are_added(
    any_client: TestClient, any_database: Database, sort: str
) -> None:
    for index in range(11):
        reward = None if index % 3 == 0 else index % 4 / 4
        add_run(any_database, "queued", name=f"run {index % 5}", last_reward=reward)
    before = {run["id"] for run in walk(any_client, "/api/v1/runs")}
    found = walk(any_client, "/api/v1/runs", lambda: add_run(any_database), sort=sort, limit=3)
    ids = [run["id"] for run in found]
    assert len(ids) == len(set(ids))
    assert before <= set(ids)


def test_an_unknown_sort_and_a_foreign_cursor_are_explained(client: TestClient, database: Database) -> None:
    assert "last_reward" in client.get("/api/v1/runs?sort=colour").json()["errors"][0]["remedy"]
    for _ in range(2):
        add_run(database)
    cursor = client.get("/api/v1/runs?sort=name&limit=1").json()["next_cursor"]
    assert client.get("/api/v1/runs", params={"sort": "-number", "cursor": cursor}).status_code == 400
    assert client.get("/api/v1/runs?cursor=AAAA").status_code == 400


# ---------------------------------------------------------------- steering
ALLOWED = {
    "cancel": {"queued", "starting", "running", "pausing", "paused"},
    "pause": {"queued", "starting", "running"},
    "resume": {"paused"},
}
STATES = ["queued", "starting", "running", "pausing", "paused", "cancelling", "completed", "failed", "cancelled"]


@pytest.mark.parametrize("intent", sorted(ALLOWED))
def test_an_intent_is_accepted_in_its_states_and_a_conflict_in_all_others(
    client: TestClient, database: Database, intent: str
) -> None:
    for state in STATES:
        run_id = add_run(database, state)
        answer = client.post(f"/api/v1/runs/{run_id}/{intent}")
        assert answer.status_code == (202 if state in ALLOWED[intent] else 409), state
        if answer.status_code == 409:
            assert state in answer.json()["detail"]
            assert client.get(f"/api/v1/runs/{run_id}").json()["state"] == state


def test_a_cancelled_queued_run_can_no_longer_be_paused(any_client: TestClient) -> None:
    start(any_client)
    assert any_client.post("/api/v1/runs/1/pause").json()["state"] == "paused"
    assert any_client.post("/api/v1/runs/1/resume").json()["state"] == "queued"
    assert any_client.post("/api/v1/runs/1/cancel").json()["state"] == "cancelled"
    answer = any_client.post("/api/v1/runs/1/pause")
    assert answer.status_code == 409
    assert "cancelled" in answer.json()["detail"]


def test_early_stopping_is_overridden_while_the_run_goes_on(seeded: TestClient) -> None:
    before = seeded.get("/api/v1/runs/2").json()
    assert before["early_stopping"]["rule"] == "literal"
    after = seeded.put("/api/v1/runs/2/early-stopping", json={"mode": "off"}).json()
    assert (after["early_stopping_override"], after["version"]) == ("off", before["version"] + 1)
    assert seeded.put("/api/v1/runs/1/early-stopping", json={"mode": "off"}).status_code == 409
    assert seeded.put("/api/v1/runs/2/early-stopping", json={"mode": "maybe"}).status_code == 422
    cleared = seeded.put("/api/v1/runs/2/early-stopping", json={"mode": None}).json()
    assert cleared["early_stopping_override"] is None


def test_reading_is_not_running(seeded_app: FastAPI) -> None:
    with TestClient(seeded_app, headers=bearer(seeded_app, ["read"])) as reader:
        assert reader.get("/api/v1/runs/1").status_code == 200
        answer = reader.post("/api/v1/runs/2/cancel")
        assert answer.status_code == 403
        assert "`run`" in answer.json()["detail"]


# ---------------------------------------------------------------- clone, fork, delete
def test_a_clone_is_a_new_run_with_changed_settings(seeded: TestClient) -> None:
    changes = {"name": "copy", "stages.1.optimizer.learning_rate": 0.5}
    clone = seeded.post("/api/v1/runs/1/clone", json={"changes": changes}).json()
    detail = seeded.get(f"/api/v1/runs/{clone['number']}").json()
    assert detail["config"]["stages"][1]["optimizer"]["learning_rate"] == 0.5
    assert detail["parent_run_id"] == seeded.get("/api/v1/runs/1").json()["id"]
    assert detail["parent_checkpoint_id"] is None
    told = seeded.get("/api/v1/configs/diff", params={"before": "run:1", "after": f"run:{clone['number']}"}).json()
    assert {change["path"] for change in told["changes"]} == {"name", "stages.1.optimizer.learning_rate"}


@pytest.mark.parametrize("state", STATES)
def test_only_ended_runs_are_deleted(client: TestClient, database: Database, state: str) -> None:
    run_id = add_run(database, state)
    answer = client.delete(f"/api/v1/runs/{run_id}")
    assert answer.status_code == (204 if state in TERMINAL_STATES else 409)
    assert client.get(f"/api/v1/runs/{run_id}").status_code == (404 if state in TERMINAL_STATES else 200)


def test_deleting_removes_rows_and_bytes_even_when_some_files_are_gone(any_seeded: TestClient) -> None:
    run = any_seeded.get("/api/v1/runs/1").json()
    app: Any = any_seeded.app
    folder = app.state.settings.home / "runs" / run["id"]
    (folder / "attempts" / "1" / "engine.log").unlink()
    assert any_seeded.delete("/api/v1/runs/1").status_code == 204
    assert not folder.exists()
    assert any_seeded.get("/api/v1/runs/1").status_code == 404
    assert any_seeded.get("/api/v1/checkpoints").json()["items"] == []
    with app.state.database.read() as session:
        assert session.query(Run).count() == 0
