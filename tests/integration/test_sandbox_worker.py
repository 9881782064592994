"""A worker finds out at its start how it can confine programs, and the workers page says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import update

from app.db import Database
from app.models import Worker
from tests import seed
from tests.sandbox_tiers import available
from tests.waiting import wait_until
from tests.worker_house import WorkerHouse


@pytest.mark.alone
@pytest.mark.timeout(600)
def test_a_worker_writes_its_tier_to_its_row(tmp_path: Path) -> None:
    with WorkerHouse(tmp_path / "home") as house:
        house.start_worker(COHORT_SANDBOX_CHECK="true")

        def report() -> dict[str, Any] | None:
            with house.db.read() as session:
                row = session.query(Worker).first()
                return row.sandbox if row else None

        found = wait_until(report, 400, "the worker's sandbox report")
    assert found["tier"] == available()[0], found
    assert found["details"][available()[0]] == "passed"


def test_a_worker_that_tests_nothing_says_so(tmp_path: Path) -> None:
    with WorkerHouse(tmp_path / "home") as house:
        house.start_worker(COHORT_SANDBOX_CHECK="false")

        def tier() -> str | None:
            with house.db.read() as session:
                row = session.query(Worker).first()
                return row.sandbox["tier"] if row and row.sandbox else None

        assert wait_until(tier, 60, "the worker's word on its sandbox") == "not tested"


def test_page_and_api_show_how_a_worker_confines_programs(database: Database, client: TestClient) -> None:
    seed.worker(database)
    assert "testing" in client.get("/workers").text
    report = {"tier": "refused", "details": {"landlock": "the kernel's Landlock ABI is 1, 4 is the least"}}
    with database.write() as session:
        session.execute(update(Worker).values(sandbox=report))
    page = client.get("/workers").text
    assert "refused" in page
    assert "Landlock ABI is 1" in page
    assert client.get("/api/v1/workers").json()["items"][0]["sandbox"] == report
