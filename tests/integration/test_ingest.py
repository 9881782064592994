"""Ingestion: every journal line exactly once, whoever ships it, however it is cut, and the rows it becomes."""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from sqlalchemy import select

from app.db import Database
from app.ingest import ingest_attempt
from app.models import (
    Attempt,
    Base,
    Checkpoint,
    EvaluationResult,
    FindingRow,
    JournalEvent,
    Point,
    RolloutBatch,
    Run,
    SelfTestRow,
    Series,
)
from grpo_engine.events import Journal
from tests.rows import add_attempt, add_run

RL = "1-rl"


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    db = Database(f"sqlite:///{tmp_path / 'ingest.db'}")
    Base.metadata.create_all(db.engine)
    yield db
    db.dispose()


def ingest_all(db: Database, attempt: uuid.UUID, folder: Path, max_events: int = 1000) -> int:
    total = 0
    while count := ingest_attempt(db, attempt, folder, max_events=max_events):
        total += count
    return total


def train(journal: Journal, steps: Sequence[int], checkpoint_every: int = 5) -> None:
    for step in steps:
        journal.append("rollouts", stage=RL, batch=step, path=f"rollouts/{step}", num_groups=2, num_completions=4)
        journal.metrics(step, {"reward/mean": step / 10, "loss": math.nan if step == 3 else 1.0}, stage=RL)
        journal.append("trained", stage=RL, step=step, batches=[step], started_boot_s=step, ended_boot_s=step + 0.5)
        if step % checkpoint_every == 0:
            path = f"checkpoints/{RL}-{step:06d}"
            journal.append("checkpoint", stage=RL, step=step, path=path, bytes=10, sha256="a" * 64)


def write_journal(folder: Path, first: int = 1, last: int = 12) -> None:
    journal = Journal(folder)
    journal.append("started", config_hash="0", stage_index=1, step=first - 1, total_steps=50)
    journal.append("stage_started", stage=RL, step=first - 1, num_steps=40)
    journal.append("heartbeat", next_within_s=5)
    train(journal, range(first, last + 1))
    journal.close()


def dump(db: Database) -> list[object]:
    with db.read() as session:
        run = session.scalars(select(Run)).one()
        events = [(row.seq, row.type, row.step, row.payload) for row in session.scalars(select(JournalEvent))]
        columns = (Series.name, Series.stage, Point.step, Point.value, Point.kind)
        points = session.execute(select(*columns).join(Point, Point.series_id == Series.id)).all()
        batches = [(row.batch, row.step, row.path) for row in session.scalars(select(RolloutBatch))]
        place = (run.stage, run.step, run.stage_steps, run.steps_done, run.total_steps, run.last_reward, run.sparkline)
        return [events, sorted(tuple(point) for point in points), batches, place]


@pytest.mark.parametrize("max_events", [1, 2, 7])
def test_however_a_journal_is_cut_the_rows_are_the_same(db: Database, tmp_path: Path, max_events: int) -> None:
    write_journal(tmp_path / "a")
    whole = add_attempt(db, run := add_run(db, "running"))
    assert ingest_all(db, whole, tmp_path / "a") == 41
    expected = dump(db)
    other = Database(f"sqlite:///{tmp_path / 'other.db'}")
    Base.metadata.create_all(other.engine)
    cut = add_attempt(other, add_run(other, "running", id=run))

    assert ingest_all(other, cut, tmp_path / "a", max_events) == 41
    assert dump(other) == expected
    other.dispose()


def test_progress_follows_the_newest_attempt(db: Database, tmp_path: Path) -> None:
    write_journal(tmp_path / "a")
    attempt = add_attempt(db, add_run(db, "running"))
    ingest_all(db, attempt, tmp_path / "a")

    assert dump(db)[3] == (RL, 12, 40, 22, 50, 1.2, [step / 10 for step in range(1, 13)])
    with db.read() as session:
        assert session.get_one(Attempt, attempt).first_step == 10


def test_rollouts_learn_the_step_that_trained_on_them(db: Database, tmp_path: Path) -> None:
    write_journal(tmp_path / "a")
    run = add_run(db, "running")
    ingest_all(db, add_attempt(db, run), tmp_path / "a")

    assert dump(db)[2] == [(step, step, f"runs/{run}/attempts/1/rollouts/{step}") for step in range(1, 13)]


def test_a_value_that_is_not_finite_keeps_its_kind(db: Database, tmp_path: Path) -> None:
    write_journal(tmp_path / "a")
    ingest_all(db, add_attempt(db, add_run(db, "running")), tmp_path / "a")

    with db.read() as session:
        odd = session.execute(select(Point.step, Point.value, Point.kind).where(Point.kind.is_not(None))).all()
    assert [tuple(row) for row in odd] == [(3, None, "nan")]


def test_a_torn_line_waits_until_it_is_whole(db: Database, tmp_path: Path) -> None:
    write_journal(tmp_path / "a")
    path = tmp_path / "a" / "journal.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    attempt = add_attempt(db, add_run(db, "running"))
    assert ingest_all(db, attempt, tmp_path / "a") == 40

    path.write_bytes(whole)
    assert ingest_all(db, attempt, tmp_path / "a") == 1


def test_a_damaged_line_becomes_a_warning_and_stops_nothing(db: Database, tmp_path: Path) -> None:
    write_journal(tmp_path / "a")
    path = tmp_path / "a" / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[4] = b'{"seq": 5, "type": "nonsense"}\n'
    path.write_bytes(b"".join(lines))

    assert ingest_all(db, add_attempt(db, add_run(db, "running")), tmp_path / "a") == 41
    with db.read() as session:
        row = session.scalars(select(JournalEvent).where(JournalEvent.type == "warning")).one()
    assert row.seq == 5
    assert "nonsense" in row.payload["message"]


def test_many_shippers_at_once_store_each_line_once(db: Database, tmp_path: Path) -> None:
    write_journal(tmp_path / "a", last=30)
    attempt = add_attempt(db, add_run(db, "running"))
    counts: list[int] = []

    def ship() -> None:
        counts.append(ingest_all(db, attempt, tmp_path / "a", 3))

    threads = [threading.Thread(target=ship) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(counts) == 99
    assert len(dump(db)[0]) == 99 - 30 - 1  # type: ignore[arg-type]


def test_repeated_steps_are_counted_also_when_the_older_tail_comes_late(db: Database, tmp_path: Path) -> None:
    write_journal(tmp_path / "a", 1, 12)
    write_journal(tmp_path / "b", 6, 20)
    run = add_run(db, "running")
    first = add_attempt(db, run, "lost")
    ingest_attempt(db, first, tmp_path / "a", max_events=3 + 3 * 8 + 1)  # up to step 8
    second = add_attempt(db, run)
    ingest_all(db, second, tmp_path / "b")
    repeated = select(Attempt.repeated_steps).where(Attempt.id == second)
    with db.read() as session:
        assert session.scalar(repeated) == 3

    ingest_all(db, first, tmp_path / "a")
    with db.read() as session:
        assert session.scalar(repeated) == 7
        assert session.get_one(Run, run).step == 20


def test_checkpoints_form_a_chain_over_attempts(db: Database, tmp_path: Path) -> None:
    write_journal(tmp_path / "a")
    run = add_run(db, "running")
    ingest_all(db, add_attempt(db, run, "lost"), tmp_path / "a", 4)
    by_step = select(Checkpoint).order_by(Checkpoint.saved_at)
    with db.read() as session:
        five, ten = session.scalars(by_step)
    second = add_attempt(db, run, resumed_from_id=ten.id)
    journal = Journal(tmp_path / "b")
    train(journal, range(11, 16))
    journal.append("checkpoint_removed", stage=RL, step=15, path=f"checkpoints/{RL}-000015")
    journal.close()

    ingest_all(db, second, tmp_path / "b")
    with db.read() as session:
        last = session.scalars(by_step).all()[-1]
    assert (five.parent_id, ten.parent_id, last.parent_id) == (None, five.id, ten.id)
    assert (ten.path, ten.stage_index) == (f"runs/{run}/attempts/1/checkpoints/{RL}-000010", 1)
    assert (ten.state, last.state) == ("saved", "removed")


def test_findings_open_and_are_withdrawn(db: Database, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a")
    fields = {"step": 4, "severity": "warning", "onset_step": 2, "title": "t", "evidence": "e", "remedy": "r"}
    journal.append("finding", stage=RL, detector="entropy", **fields)
    journal.append("finding", stage=RL, detector="truncation", **fields)
    journal.append("finding", stage=RL, detector="entropy", **fields, resolved=True)
    journal.close()
    ingest_all(db, add_attempt(db, add_run(db, "running")), tmp_path / "a", 2)

    with db.read() as session:
        found = {row.detector: row.state for row in session.scalars(select(FindingRow))}
    assert found == {"entropy": "resolved", "truncation": "open"}


def test_an_evaluation_is_a_row_and_points(db: Database, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a")
    metrics = {"accuracy_greedy": 0.25}
    journal.append("evaluation", stage=RL, step=0, benchmark="held_out", num_prompts=8, metrics=metrics)
    journal.metrics(0, {"evaluation/accuracy_greedy": 0.25}, stage=RL)
    journal.close()
    ingest_all(db, add_attempt(db, add_run(db, "running")), tmp_path / "a")

    assert dump(db)[1] == [("evaluation/accuracy_greedy", RL, 0, 0.25, None)]
    with db.read() as session:
        assert session.scalars(select(EvaluationResult)).one().metrics == metrics


def test_ingestion_keeps_up_with_5000_values_a_second(db: Database, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a")
    for step in range(1, 401):
        journal.metrics(step, {f"metric/{number}": number * step for number in range(25)}, stage=RL)
    journal.close()
    attempt = add_attempt(db, add_run(db, "running"))
    begun = time.process_time()  # the machine may be shared; commits of one transaction a 1,000 lines hardly count
    ingest_all(db, attempt, tmp_path / "a")

    assert 10_000 / (time.process_time() - begun) > 5_000


def test_self_tests_are_kept_with_their_detail(db: Database, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a")
    journal.append("self_test", stage=RL, name="end_tokens", passed=True, detail="ends at <eos>")
    journal.append("self_test", stage=RL, name="on_policy_ratio", passed=False, detail="1.2 instead of 1")
    journal.close()
    ingest_all(db, add_attempt(db, add_run(db, "running")), tmp_path / "a", 1)

    with db.read() as session:
        rows = session.scalars(select(SelfTestRow).order_by(SelfTestRow.seq)).all()
    assert [(row.seq, row.stage, row.name, row.passed, row.detail) for row in rows] == [
        (1, RL, "end_tokens", True, "ends at <eos>"),
        (2, RL, "on_policy_ratio", False, "1.2 instead of 1"),
    ]
