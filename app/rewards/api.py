"""REST: registered reward source code."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from app.idempotency import ApiRoute
from app.models import RewardSource
from app.rewards import service
from app.rewards.schemas import RewardIn, RewardOut, RewardsOut
from app.security import Coder, Reader
from app.sessions import ReadSession, WriteSession

router = APIRouter(prefix="/rewards", tags=["rewards"], route_class=ApiRoute)


@router.get("", response_model=RewardsOut)
def list_rewards(_: Reader, session: ReadSession, name: str | None = None) -> dict[str, Any]:
    """Every registered version, newest first."""
    return {"items": service.list_sources(session, name)}


@router.post("", status_code=201, response_model=RewardOut)
def register_reward(user: Coder, body: RewardIn, session: WriteSession) -> RewardSource:
    """Register reward source code (needs `code`). It is compiled, not executed; workers execute it."""
    return service.register(session, user, body.name, body.source)


@router.get("/{name}", response_model=RewardOut)
def get_reward(_: Reader, name: str, session: ReadSession) -> RewardSource:
    """The newest version."""
    return service.get_source(session, name)


@router.get("/{name}/{hash}", response_model=RewardOut)
def get_reward_version(_: Reader, name: str, hash: str, session: ReadSession) -> RewardSource:
    return service.get_source(session, name, hash)
