from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient

from tests import seed
from tests.integration.test_api_runs import walk

Row = dict[str, Any]
SEARCH = "/api/v1/runs/1/rollouts/search"


def all_rows(client: TestClient) -> list[Row]:
    """Every completion of run 1, read without the application, in the order of search."""
    app: Any = client.app
    run = client.get("/api/v1/runs/1").json()["id"]
    files = sorted((app.state.settings.home / "runs" / run / "attempts").glob("*/rollouts/*.parquet"))
    rows: list[Row] = []
    for path in files:
        attempt, batch = int(path.parts[-3]), int(path.stem.removeprefix("batch-"))
        rows += [{**row, "attempt": attempt, "batch": batch} for row in pq.read_table(path).to_pylist()]
    return rows


def zero(row: Row, name: str) -> bool:
    return any(part["name"] == name and part["value"] == 0 for part in row["parts"])


CASES: list[tuple[Row, Callable[[Row], bool]]] = [
    ({}, lambda row: True),
    ({"text": "CARRY 1"}, lambda row: "carry 1" in row["completion_text"].lower()),
    ({"text": "+1", "where": "prompt"}, lambda row: "+1" in row["prompt_text"]),
    ({"text": "1", "where": "both"}, lambda row: "1" in row["prompt_text"] + row["completion_text"]),
    ({"text": "%' OR 1=1; --"}, lambda row: False),
    ({"text": ".*"}, lambda row: False),
    ({"min_reward": 0.1, "max_reward": 1.0}, lambda row: 0.1 <= row["reward"] <= 1.0),
    ({"zero_part": "accuracy"}, lambda row: zero(row, "accuracy")),
    ({"zero_part": "nothing"}, lambda row: False),
    ({"behaviour": "reflection"}, lambda row: dict(row["behaviours"])["reflection"] > 0),
    (
        {"behaviour": "backtracking", "text": "think"},
        lambda row: dict(row["behaviours"])["backtracking"] > 0 and "think" in row["completion_text"],
    ),
    ({"behaviour": "alternatives"}, lambda row: False),
    ({"truncated": True}, lambda row: row["finish_reason"] == "length"),
    ({"truncated": False, "zero_part": "format"}, lambda row: row["finish_reason"] != "length" and zero(row, "format")),
    ({"prompt_id": "addition/285+555"}, lambda row: row["prompt_id"] == "addition/285+555"),
    ({"attempt": 1, "text": "think"}, lambda row: row["attempt"] == 1 and "think" in row["completion_text"]),
]


def places(rows: list[Row]) -> list[tuple[int, int, int, int]]:
    return [(row["attempt"], row["batch"], row["group_index"], row["completion_index"]) for row in rows]


@pytest.mark.parametrize(("filters", "wanted"), CASES)
def test_search_finds_what_a_plain_loop_finds(seeded: TestClient, filters: Row, wanted: Callable[[Row], bool]) -> None:
    hits = walk(seeded, SEARCH, limit=37, **filters)
    found = [(hit["attempt"], hit["batch"], hit["group"], hit["completion"]) for hit in hits]
    assert found == places([row for row in all_rows(seeded) if wanted(row)])


def test_the_cases_find_something_and_not_everything(seeded: TestClient) -> None:
    rows = all_rows(seeded)
    counts = [sum(map(wanted, rows)) for _, wanted in CASES[1:4] + CASES[6:8] + CASES[9:11] + CASES[12:]]
    assert all(0 < count < len(rows) for count in counts)


def test_a_hit_shows_the_text_around_what_was_found(seeded: TestClient) -> None:
    [hit, *_] = seeded.get(SEARCH, params={"text": "carry"}).json()["items"]
    assert "carry" in hit["excerpt"]
    assert hit["step"] == hit["batch"]
    assert hit["stage"] == "1-rl"


def test_a_batch_file_that_is_gone_is_counted_not_hidden(seeded: TestClient) -> None:
    app: Any = seeded.app
    run = seeded.get("/api/v1/runs/1").json()["id"]
    first = app.state.settings.home / "runs" / run / "attempts" / "1" / "rollouts"
    (first / "batch-000001.parquet").unlink()
    (first / "batch-000002.parquet").write_bytes(b"torn")
    page = seeded.get(SEARCH, params={"attempt": 1, "limit": 200}).json()
    assert page["num_missing"] == 2
    assert page["items"][0]["batch"] == 3


def test_the_groups_of_a_step_come_from_its_newest_attempt(any_seeded: TestClient) -> None:
    groups = any_seeded.get("/api/v1/runs/1/stages/1-rl/steps/10/groups").json()["items"]
    assert [(group["attempt"], group["batch"], group["index"]) for group in groups] == [(2, 10, i) for i in range(4)]
    for group in groups:
        assert group["mean"] == pytest.approx(statistics.fmean(group["rewards"]), rel=1e-12)
        assert group["std"] == pytest.approx(statistics.stdev(group["rewards"]), rel=1e-12)
    old = any_seeded.get("/api/v1/runs/1/stages/1-rl/steps/10/groups?attempt=1").json()["items"]
    assert {group["attempt"] for group in old} == {1}
    assert any_seeded.get("/api/v1/runs/1/stages/1-rl/steps/999/groups").status_code == 404


def test_a_group_shows_its_arithmetic(any_seeded: TestClient) -> None:
    group = any_seeded.get("/api/v1/runs/1/attempts/2/batches/10/groups/1").json()
    assert len(group["completions"]) == 4
    assert (group["form"]["kind"], group["whitening"]) == ("grpo", None)
    assert group["numbers"]["scale"] == group["numbers"]["std"]
    for completion in group["completions"]:
        products = [part["product"] for part in completion["parts"] if part["value"] is not None]
        assert completion["weighted_sum"] == pytest.approx(sum(products), rel=1e-12)
        assert completion["reward"] == pytest.approx(completion["weighted_sum"], rel=1e-12)
        assert (completion["shaped_reward"], completion["rank"]) == (None, None)
        assert completion["advantage"] == pytest.approx(completion["expected_advantage"], rel=1e-9, abs=1e-12)
        start, end = completion["parts"][0]["span"]
        assert completion["text"][start:end].isdigit()
    assert group["gold"] == group["columns"]["answer"]


def test_every_group_of_a_batch_has_its_own_row_group(seeded: TestClient) -> None:
    groups = [seeded.get(f"/api/v1/runs/1/attempts/2/batches/12/groups/{i}").json() for i in range(4)]
    assert [group["group_id"] for group in groups] == [f"12-{i}" for i in range(4)]
    for wrong in ("2/batches/12/groups/4", "2/batches/12/groups/-1", "2/batches/99/groups/0", "9/batches/12/groups/0"):
        assert seeded.get(f"/api/v1/runs/1/attempts/{wrong}").status_code == 404


def test_tokens_come_with_their_logprobs(seeded: TestClient) -> None:
    base = "/api/v1/runs/1/attempts/2/batches/10/groups/1"
    completion = seeded.get(base).json()["completions"][2]
    tokens = seeded.get(f"{base}/completions/2/tokens").json()["items"]
    assert "".join(token["text"] for token in tokens) == completion["text"]
    assert all(-1 <= token["logprob"] <= 0 and token["kept"] is None for token in tokens)
    assert seeded.get(f"{base}/completions/4/tokens").status_code == 404


def test_batches_are_listed_once_each_over_all_pages(any_seeded: TestClient) -> None:
    batches = walk(any_seeded, "/api/v1/runs/1/batches", limit=5)
    expected = [(1, n) for n in range(1, seed.LOST_AFTER + 1)]
    expected += [(2, n) for n in range(seed.CHECKPOINT_EVERY + 1, seed.RL_STEPS + 1)]
    assert [(batch["attempt"], batch["batch"]) for batch in batches] == expected
    assert all(batch["step"] == batch["batch"] for batch in batches)
