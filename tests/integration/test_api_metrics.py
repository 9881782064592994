from __future__ import annotations

import json
import math
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.db import Database
from app.settings import Settings
from grpo_engine.events import Journal
from tests import seed
from tests.rows import add_attempt, add_run


def series(client: TestClient, *names: str, run: int = 1, **params: Any) -> list[dict[str, Any]]:
    answer = client.get(f"/api/v1/runs/{run}/series", params={"names": names, **params})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["items"])


def journaled(client: TestClient, values: dict[int, float], attempts: int = 1) -> int:
    """A run whose attempts told these values of the metric `x`; its number."""
    from app.ingest import ingest_attempt

    app: Any = client.app
    database, settings = app.state.database, app.state.settings
    run_id = add_run(database, "running")
    for number in range(1, attempts + 1):
        attempt_id = add_attempt(database, run_id)
        folder = settings.attempt_folder(run_id, number)
        journal = Journal(folder)
        for step, value in values.items():
            journal.metrics(step, {"x": value}, stage="1-rl")
        journal.close()
        while ingest_attempt(database, attempt_id, folder):
            pass
    return int(client.get(f"/api/v1/runs/{run_id}").json()["number"])


def test_the_newest_attempt_of_each_step_counts(any_seeded: TestClient) -> None:
    [loss] = series(any_seeded, "reward/mean")
    attempts = dict(zip(loss["step"], loss["attempt"], strict=True))
    assert list(attempts) == list(range(1, seed.RL_STEPS + 1))
    kept = {step: 1 if step <= seed.CHECKPOINT_EVERY else 2 for step in attempts}
    assert attempts == kept
    assert loss["run_step"] == [seed.SFT_STEPS + step for step in attempts]
    [old] = series(any_seeded, "reward/mean", attempt=1)
    assert old["step"] == list(range(1, seed.LOST_AFTER + 1))


def test_steps_trained_twice_are_counted(any_seeded: TestClient) -> None:
    newest, first = any_seeded.get("/api/v1/runs/1/attempts").json()["items"]
    assert (newest["number"], newest["repeated_steps"]) == (2, seed.LOST_AFTER - seed.CHECKPOINT_EVERY)
    assert (first["number"], first["state"], first["worker_name"]) == (1, "lost", "seed")


@pytest.mark.parametrize(("value", "kind"), [(math.nan, "nan"), (math.inf, "+inf"), (-math.inf, "-inf")])
def test_numbers_that_json_lacks_come_out_as_null_with_their_kind(
    any_client: TestClient, value: float, kind: str
) -> None:
    number = journaled(any_client, {1: 0.5, 2: value, 3: -0.0})
    raw = any_client.get(f"/api/v1/runs/{number}/series", params={"names": "x"}).text
    [points] = json.loads(raw, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))["items"]
    assert points["value"] == [0.5, None, -0.0]
    assert points["kind"] == [None, kind, None]
    assert "1.79" not in raw


def test_a_large_finite_number_stays_what_it_is(any_client: TestClient) -> None:
    number = journaled(any_client, {1: 1.7e308, 2: 5e-324, 3: 0.1})
    [points] = series(any_client, "x", run=number)
    assert points["value"] == [1.7e308, 5e-324, 0.1]


def test_a_long_series_is_thinned_and_says_what_it_hides(any_client: TestClient) -> None:
    values = {step: 9.0 if step == 777 else math.sin(step) for step in range(1, 1501)}
    number = journaled(any_client, values)
    [points] = series(any_client, "x", run=number, max_points=100)
    assert points["total"] == 1500
    assert points["hidden"] == 1500 - len(points["step"])
    assert len(points["step"]) <= 100
    assert max(points["value"]) == 9.0
    assert series(any_client, "x", run=number, max_points=100) == [points]
    [whole] = series(any_client, "x", run=number, max_points=2000)
    assert (whole["hidden"], len(whole["step"])) == (0, 1500)


def test_a_chart_asks_only_for_what_is_new(seeded: TestClient) -> None:
    [whole] = series(seeded, "loss")
    [new] = series(seeded, "loss", after_step=whole["run_step"][-3])
    assert new["run_step"] == whole["run_step"][-2:]
    assert [item["name"] for item in series(seeded, "loss", "nothing")] == ["loss", "nothing"]


def test_names_and_latest_values(any_seeded: TestClient) -> None:
    names = any_seeded.get("/api/v1/runs/1/metrics").json()["items"]
    assert names == sorted(names)
    assert {"reward/mean", "sft/token_accuracy", "evaluation/accuracy_greedy"} <= set(names)
    latest = any_seeded.get("/api/v1/runs/1/metrics/latest").json()["items"]
    assert latest["reward/mean"]["step"] == seed.RL_STEPS
    assert latest["sft/token_accuracy"]["stage"] == "0-sft"
    assert set(latest) == set(names)


def test_evaluations_findings_and_log_of_a_run(seeded: TestClient) -> None:
    evaluations = seeded.get("/api/v1/runs/1/evaluations").json()["items"]
    assert evaluations[0]["step"] == 0
    assert "accuracy_greedy" in evaluations[0]["metrics"]
    found = seeded.get("/api/v1/findings", params={"run": 1, "open": True}).json()["items"]
    assert [finding["detector"] for finding in found] == ["zero_variance"]
    assert found[0]["remedy"]
    newest = seeded.get("/api/v1/runs/1/log", params={"tail": 2}).json()
    assert newest["attempt"] == 2
    assert newest["text"].splitlines()[-1].startswith(f"INFO step {seed.RL_STEPS}")
    assert len(newest["text"].splitlines()) == 2
    assert seeded.get("/api/v1/runs/1/log/download", params={"attempt": 1}).text.startswith("INFO engine started")


def test_a_failed_attempt_tells_its_cause(seeded: TestClient) -> None:
    run = seeded.get("/api/v1/runs/3").json()
    assert (run["state"], run["reason"]) == ("failed", "out_of_memory")
    assert run["git_commit"] == "c0ffee" + "0" * 34
    [attempt] = seeded.get("/api/v1/runs/3/attempts").json()["items"]
    assert "OutOfMemoryError" in attempt["traceback"]


def test_a_run_nobody_has_started_has_no_log_yet(client: TestClient, database: Database, settings: Settings) -> None:
    run_id = add_run(database)
    assert client.get(f"/api/v1/runs/{run_id}/log").status_code == 404
    add_attempt(database, run_id)
    assert client.get(f"/api/v1/runs/{run_id}/log").json()["text"] == ""
