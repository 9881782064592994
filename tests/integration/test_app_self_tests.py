"""What a run checked before training: in the API, on its page, live and after an import."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from fastapi.testclient import TestClient

from app.db import Database
from app.runs.importing import import_run
from app.runs.self_tests import list_self_tests, self_test_card
from app.runs.service import get_run
from app.settings import Settings
from tests import seed
from tests.callers import browser
from tests.integration.test_app_importing import attempts_of

RL_CHECKS = ["end_tokens", "special_tokens", "gradient_invariance", "on_policy_ratio"]


def failing_run(database: Database, settings: Settings) -> None:
    """Run 1: its reinforcement-learning stage finds a ratio that is not 1."""
    seed.queued(database)
    with seed.AttemptWriter(database, settings, seed.claimed(database)) as writer:
        writer.started(0, 0)
        writer.tested("0-sft")
        writer.tested("1-rl", ratio="1.2")


def test_the_api_tells_every_check_of_every_attempt(any_seeded: TestClient) -> None:
    items = any_seeded.get("/api/v1/runs/1/self-tests").json()["items"]
    told = [item["name"] for item in items if (item["attempt"], item["stage"]) == (1, "1-rl")]
    assert told == RL_CHECKS
    assert {item["attempt"] for item in items} == {1, 2}
    assert all(item["passed"] and item["detail"] for item in items)


def test_the_page_says_that_all_passed_and_what_was_checked(seeded_app: FastAPI) -> None:
    text = browser(seeded_app).get("/runs/2").text
    assert "✓ all 6 passed" in text
    assert "On-policy ratio" in text
    assert "the same within 2e-7 in 1, 2 and 4 micro-batches" in text


def test_a_failed_check_is_shown_with_its_detail(app: FastAPI, settings: Settings) -> None:
    failing_run(app.state.database, settings)
    text = browser(app).get("/runs/1").text
    assert "✕ 1 of 6 failed" in text
    assert "mean ratio 1.2; it must be 1" in text.partition("what was checked")[0]


def test_before_the_first_check_the_card_says_what_will_appear(app: FastAPI, database: Database) -> None:
    seed.queued(database)
    assert "Before each stage the engine checks" in browser(app).get("/runs/1").text
    seed.queued(database, self_test="off")
    assert "This run trains without one" in browser(app).get("/runs/2").text


def test_only_the_newest_attempt_is_on_the_card(seeded_app: FastAPI) -> None:
    with seeded_app.state.database.read() as session:
        card = self_test_card(session, get_run(session, 1))
    assert [(stage.attempt, stage.stage) for stage in card.stages] == [(2, "1-rl")]


def test_an_imported_run_brings_its_self_tests(database: Database, settings: Settings, seeded_home: Path) -> None:
    run = import_run(settings, database, attempts_of(seeded_home, "finished"))
    with database.read() as session:
        assert [view.row.name for view in list_self_tests(session, run)] == RL_CHECKS
