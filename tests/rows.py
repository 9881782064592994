"""Rows and journals that tests of workers and ingestion start from."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from sqlalchemy import func, select

from app.db import Database
from app.models import Attempt, Run, utc_now

CONFIG: dict[str, Any] = {
    "stages": [{"kind": "sft", "num_steps": 10}, {"kind": "rl", "num_steps": 40}],
    "needs": {"device": "cpu", "num_ranks": 1, "labels": []},
}


def add_run(db: Database, state: str = "queued", config: Mapping[str, Any] = CONFIG, **fields: Any) -> uuid.UUID:
    """A run as the web application launches it."""
    with db.write() as session:
        number = (session.scalar(select(func.max(Run.number))) or 0) + 1
        values: dict[str, Any] = {"name": f"run {number}", "tags": [], "config_hash": "0" * 64, "sparkline": []}
        values |= {"config": dict(config), "reward_sources": {}, "needs": config["needs"], "queued_at": utc_now()}
        run = Run(number=number, state=state, **({"id": uuid.uuid4()} | values | fields))
        session.add(run)
    return run.id


def add_attempt(db: Database, run_id: uuid.UUID, state: str = "running", **fields: Any) -> uuid.UUID:
    """The run's next attempt."""
    with db.write() as session:
        run = session.get_one(Run, run_id)
        run.num_attempts += 1
        attempt = Attempt(id=uuid.uuid4(), run_id=run_id, number=run.num_attempts, state=state, token="t", devices=[])
        for name, value in fields.items():
            setattr(attempt, name, value)
        session.add(attempt)
    return attempt.id
