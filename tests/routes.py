"""Every route of the application with an address that answers on the seeded home."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from sqlalchemy import select
from starlette.routing import Route

from app.configs.service import save_config
from app.db import Database
from app.models import Base, Checkpoint, Replay, Run, User, Worker
from app.rewards.service import register
from app.security import SAFE_METHODS
from app.users.service import create_token, ensure_first_user
from tests import seed

QUERIES = {
    "/api/v1/runs/{run}/series": "names=reward/mean&names=policy/kl",
    "/api/v1/runs/{run}/log/search": "text=step",
    "/api/v1/configs/diff": "before=preset:demo&after=run:1",
    "/configs/diff": "a=preset:demo&b=preset:r1",
    "/runs/{number}/series": "stage=1-rl&names=%5B%22loss%22%5D",
}
NAMES = {"/api/v1/presets": {"name": "demo"}, "/api/v1/rewards": {"name": "exact"}, "/rewards": {"name": "exact"}}
"""Path prefix -> what `name` is there, where it is no config's."""
FIXED = {
    "run": "1", "number": "1", "place": "2-10-1", "stage": "1-rl", "step": "10", "attempt": "2", "batch": "10",
    "index": "1", "completion": "0", "name": "kept", "version": "1", "path": "config.json", "secret": "x" * 43,
}  # fmt: skip
"""Path parameter -> its value in the seeded home."""
OPEN = {"/openapi.json", "/docs"}
"""Routes that need nobody to be signed in: they show nothing that belongs to anybody."""


@dataclass(frozen=True)
class Address:
    method: str
    template: str
    url: str


def addresses(app: FastAPI) -> list[Address]:
    """One address a method and route. KeyError names a path parameter that needs a value here."""
    values = _values(app.state.database)
    return list(_addresses(app, values))


def _addresses(app: FastAPI, values: dict[str, str]) -> Iterator[Address]:
    for route in app.routes:
        if isinstance(route, Route):
            names = next((names for prefix, names in NAMES.items() if route.path.startswith(prefix)), {})
            url = _filled(route.path, {**values, **names})
            query = QUERIES.get(route.path)
            for method in sorted(route.methods or ()):
                if method != "HEAD":
                    yield Address(method, route.path, f"{url}?{query}" if query else url)


def _filled(path: str, values: dict[str, str]) -> str:
    """Example: _filled("/runs/{run}", {"run": "1"}) == "/runs/1"."""
    return re.sub(r"\{(\w+)(?::\w+)?\}", lambda found: values[found[1]], path)


def gets(app: FastAPI) -> list[Address]:
    return [address for address in addresses(app) if address.method in SAFE_METHODS]


def writes(app: FastAPI) -> list[Address]:
    return [address for address in addresses(app) if address.method not in SAFE_METHODS]


def _values(database: Database) -> dict[str, str]:
    """A value for every path parameter, from the rows there are."""
    with database.write() as session:
        user = ensure_first_user(session)
        checkpoint = session.scalars(select(Checkpoint.id).order_by(Checkpoint.saved_at)).first()
        save_config(session, user, "kept", seed.config().model_dump(mode="json"))
        reward = register(session, user, "exact", "def reward(completions, **columns):\n    return [0.0]\n")
        run = session.scalars(select(Run).where(Run.number == 1)).one()
        replay = Replay(run_id=run.id, stage="1-rl", config={"rewards": []}, state="failed")
        session.add(replay)
        session.flush()
        token, _ = create_token(session, user, "walk")
        worker = session.scalars(select(Worker.id)).one()
        user_id = session.scalars(select(User.id).where(User.name == user.name)).one()
        ids: dict[str, Any] = {
            "checkpoint_id": checkpoint, "token_id": token.id, "replay_id": replay.id, "worker_id": worker,
            "user_id": user_id,
        }  # fmt: skip
    return {**FIXED, "hash": reward.hash, **{key: str(value) for key, value in ids.items()}}


def fingerprint(database: Database) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of every table."""
    with database.read() as session:
        return {
            table.name: sorted(map(tuple, session.execute(select(table)).all()), key=repr)
            for table in Base.metadata.sorted_tables
        }
