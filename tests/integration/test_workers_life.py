"""A run's ordinary life on real workers: to its end, to its failure, paused, cancelled, moved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker_house import WorkerHouse


@pytest.fixture
def house(tmp_path: Path) -> Iterator[WorkerHouse]:
    with WorkerHouse(tmp_path / "home") as house:
        yield house


def test_a_run_goes_from_the_queue_to_its_end(house: WorkerHouse) -> None:
    house.start_worker()
    run = house.launch()

    (attempt,) = house.check(run, "completed")
    row = house.run_row(run)
    assert (row.reason, row.message, row.steps_done, attempt.state) == (
        "finished", "all steps were trained", 20, "finished",
    )  # fmt: skip
