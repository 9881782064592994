"""Workers on PostgreSQL: claims at once, a killed supervisor, a server that goes away and comes back."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.db import Database
from app.models import Attempt, Base, Worker
from tests.integration.test_workers_kills import check_resumed, kill
from tests.postgres import PostgresServer
from tests.rows import add_run
from tests.worker_house import WorkerHouse
from workers.claim import claim

pytestmark = [pytest.mark.xdist_group("postgres"), pytest.mark.postgres]


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    server = PostgresServer()
    yield server
    server.stop()


def test_of_many_claims_at_once_each_run_goes_to_one(server: PostgresServer) -> None:
    db = Database(server.url(server.create()))
    Base.metadata.create_all(db.engine)
    fields: dict[str, Any] = {"host": "h", "boot_id": "b", "pid": 1, "process_started": 1, "versions": {}}
    with db.write() as session:
        worker = Worker(id=uuid.uuid4(), name="w", state="online", labels=[], devices=[], **fields)
        session.add(worker)
    runs = {add_run(db) for _ in range(3)}
    taken: list[Attempt | None] = []

    def take() -> None:
        with db.write() as session:
            taken.append(claim(session, worker.id, ["cpu:0"], []))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    db.dispose()
    assert len(taken) == 8
    assert sorted(attempt.run_id for attempt in taken if attempt) == sorted(runs)


def test_a_run_survives_a_killed_supervisor_and_a_server_that_went_away(server: PostgresServer, tmp_path: Path) -> None:
    with WorkerHouse(tmp_path / "home", database_url=server.url(server.create())) as house:
        house.staff()
        run = house.launch(80)
        house.wait_for_step(run, 7)
        house.db.dispose()
        server.restart()
        house.wait_for_step(run, 14)
        assert house.attempt_row(run).number == 1

        kill(house.attempt_row(run).pid)
        check_resumed(house, run)
