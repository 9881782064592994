"""A run that goes on while a page is open: what its engine would journal, and what its worker would do."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from app.ingest import ingest_attempt
from app.runs.service import get_attempt, get_run
from app.runs.states import move_attempt, transition
from grpo_engine.events import JOURNAL_NAME, read
from tests.e2e.conftest import Web


class RunningJournal:
    """Goes on with the journal of a run's newest attempt and ingests every line at once."""

    def __init__(self, web: Web, number: int) -> None:
        self.web = web
        with web.database.read() as session:
            self.run = get_run(session, number)
            self.attempt = get_attempt(session, self.run)
        self.folder = web.settings.attempt_folder(self.run.id, self.attempt.number)
        self.seq = read(self.folder)[-1].seq

    def append(self, type: str, stage: str | None = "1-rl", **payload: Any) -> None:
        self.seq += 1
        line = {"seq": self.seq, "time": datetime.now(UTC).isoformat(), "type": type, "stage": stage, **payload}
        with open(self.folder / JOURNAL_NAME, "a") as file:
            file.write(json.dumps(line) + "\n")
        ingest_attempt(self.web.database, self.attempt.id, self.folder)

    def step(self, step: int, values: dict[str, float]) -> None:
        self.append("metrics", step=step, values=values)
        self.append("trained", step=step, batches=[], started_boot_s=1.0 + step, ended_boot_s=1.5 + step)

    def log(self, text: str) -> None:
        """Written before the next journal line, whose ingestion makes the page look."""
        with open(self.folder / "engine.log", "a") as file:
            file.write(text + "\n")

    def finish(self) -> None:
        self.append("finished", stage=None, reason="finished", message="all steps were trained")
        with self.web.database.write() as session:
            move_attempt(session, self.attempt.id, "finished", token=self.attempt.token)
            transition(session, self.run.id, "completed", actor="worker:seed", reason="finished", message="done")
