"""REST: a run's stored rollouts scored again by other rewards."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter

from app.idempotency import ApiRoute
from app.models import Replay
from app.rewards import replays
from app.rewards.schemas import ReplayIn, ReplayOut, ReplaysOut
from app.runs.api import RunRef
from app.runs.service import get_run
from app.security import Reader, Runner
from app.sessions import AppDatabase, AppSettings, AppStore, ReadSession, WriteSession

router = APIRouter(prefix="/runs/{run}/replays", tags=["rewards"], route_class=ApiRoute)


@router.get("", response_model=ReplaysOut)
def list_replays(_: Reader, run: RunRef, session: ReadSession) -> dict[str, Any]:
    """Newest first."""
    return {"items": replays.list_replays(session, get_run(session, run))}


@router.post("", status_code=201, response_model=ReplayOut)
def start_replay(
    user: Runner,
    run: RunRef,
    body: ReplayIn,
    session: WriteSession,
    database: AppDatabase,
    store: AppStore,
    settings: AppSettings,
) -> Replay:
    """Queue it; the web application scores one replay at a time, without a model. Look again until it has ended."""
    job = replays.Job(database, store, settings)
    given = body.config_yaml if body.config is None else body.config
    return replays.create(session, job, user, get_run(session, run), given or {}, body.stage)


@router.get("/{replay_id}", response_model=ReplayOut)
def get_replay(_: Reader, run: RunRef, replay_id: uuid.UUID, session: ReadSession) -> Replay:
    """With the summary once it is completed."""
    return replays.get_replay(session, get_run(session, run), replay_id)
