"""What must hold of a run whatever was killed, frozen or wiped: read from database, journals and /proc."""

from __future__ import annotations

import json
import os
import uuid
from itertools import pairwise
from pathlib import Path
from typing import Any

from sqlalchemy import func, select

from app.db import Database
from app.models import Attempt, JournalEvent, Point, Run, Series
from app.runs.states import ACTIVE_ATTEMPT_STATES, HELD_STATES
from app.settings import Settings

Step = tuple[str, int]


def check_run(db: Database, settings: Settings, run_id: uuid.UUID, state: str) -> list[Attempt]:
    """Assert every invariant of a run that is at rest in `state`; its attempts, oldest first."""
    with db.read() as session:
        run = session.get_one(Run, run_id)
        attempts = list(session.scalars(select(Attempt).where(Attempt.run_id == run_id).order_by(Attempt.number)))
    assert (run.state, [a.number for a in attempts]) == (state, list(range(1, run.num_attempts + 1))), run.message
    journals = [read_journal(settings, attempt) for attempt in attempts]
    for attempt, journal in zip(attempts, journals, strict=True):
        check_ingested_once(db, settings, attempt, journal)
        assert (attempt.state in ACTIVE_ATTEMPT_STATES) == (run.state in HELD_STATES and attempt is attempts[-1])
    check_never_two_at_once(journals)
    check_repeated_steps(attempts, journals)
    if state == "completed":
        assert {step for journal in journals for step in trained(journal)} == every_step(run)
    return attempts


def every_step(run: Run) -> set[Step]:
    stages = run.config["stages"]
    return {(f"{i}-{stage['kind']}", n) for i, stage in enumerate(stages) for n in range(1, stage["num_steps"] + 1)}


def read_journal(settings: Settings, attempt: Attempt) -> list[dict[str, Any]]:
    """The attempt's whole lines, read without the code under test."""
    path = settings.attempt_folder(attempt.run_id, attempt.number) / "journal.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def trained(journal: list[dict[str, Any]]) -> list[Step]:
    return [(event["stage"], event["step"]) for event in journal if event["type"] == "trained"]


def check_ingested_once(db: Database, settings: Settings, attempt: Attempt, journal: list[dict[str, Any]]) -> None:
    """Every line is in the database, none twice."""
    assert [event["seq"] for event in journal] == list(range(1, len(journal) + 1))
    assert attempt.cursor_seq == len(journal)
    with db.read() as session:
        rows = session.execute(
            select(JournalEvent.seq, JournalEvent.type).where(JournalEvent.attempt_id == attempt.id)
        ).all()
        points = session.scalar(
            select(func.count()).select_from(Point).join(Series).where(Series.attempt_id == attempt.id)
        )
    kept = [(event["seq"], event["type"]) for event in journal if event["type"] not in ("metrics", "heartbeat")]
    told = {(e["stage"], e["step"], name) for e in journal if e["type"] == "metrics" for name in e["values"]}
    told |= {
        (e["stage"], e["step"], f"evaluation/{name}")
        for e in journal
        if e["type"] == "evaluation"
        for name in e["metrics"]
    }
    assert sorted(tuple(row) for row in rows) == kept
    assert points == len(told)


def check_never_two_at_once(journals: list[list[dict[str, Any]]]) -> None:
    """No two attempts ever trained at the same moment of the host's boot clock."""
    spans = sorted(
        (event["started_boot_s"], event["ended_boot_s"], number)
        for number, journal in enumerate(journals)
        for event in journal
        if event["type"] == "trained"
    )
    for (_, ended, one), (started, _, other) in pairwise(spans):
        assert one == other or ended <= started, f"attempts {one + 1} and {other + 1} trained at once"


def check_repeated_steps(attempts: list[Attempt], journals: list[list[dict[str, Any]]]) -> None:
    """Steps trained again are marked, and none of them lies before the newest checkpoint of an earlier attempt."""
    earlier: set[Step] = set()
    saved = 0
    for attempt, journal in zip(attempts, journals, strict=True):
        mine = trained(journal)
        assert attempt.repeated_steps == len(earlier & set(mine)), f"attempt {attempt.number}"
        done = sum(event["type"] == "started" for event in journal) and attempt.first_step
        assert not journal or done >= saved, f"attempt {attempt.number} began at {done}, a checkpoint was at {saved}"
        earlier |= set(mine)
        checkpoints = [event["step"] for event in journal if event["type"] == "checkpoint"]
        saved = max([saved, *checkpoints])


def processes_of(home: Path) -> dict[int, str]:
    """Living processes that were started for this home, the broker left out: pid -> command."""
    marker = f"COHORT_HOME={home}".encode()
    found: dict[int, str] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            environment = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
            command = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state = Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if marker in environment and state not in "ZX" and int(name) != os.getpid():
            found[int(name)] = command
    return found
