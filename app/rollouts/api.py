"""REST: batches, groups, completions, tokens, search."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query

from app.idempotency import ApiRoute
from app.paging import Page, WholeNumber
from app.rollouts import service
from app.rollouts.schemas import BatchesOut, GroupsOut, SearchOut, TokensOut
from app.rollouts.searching import SearchFilters, SearchPage
from app.rollouts.searching import search as search_rollouts
from app.rollouts.service import BatchView, GroupDetail
from app.rollouts.tokens import tokens as completion_tokens
from app.runs.api import RunRef
from app.runs.service import get_run
from app.security import Reader
from app.sessions import AppStore, ReadSession

router = APIRouter(prefix="/runs/{run}", tags=["rollouts"], route_class=ApiRoute)
Limit = Annotated[int, Query(ge=1, le=200)]
Attempt = Annotated[WholeNumber | None, Query(description="The newest that did the step without one")]


@router.get("/batches", response_model=BatchesOut)
def list_batches(
    _: Reader,
    run: RunRef,
    session: ReadSession,
    stage: str | None = None,
    step: WholeNumber | None = None,
    attempt: WholeNumber | None = None,
    limit: Limit = 100,
    cursor: str | None = None,
) -> Page[BatchView]:
    """Rollout batches in the order they were sampled, with the step that trained on each."""
    return service.list_batches(
        session, get_run(session, run), stage=stage, step=step, attempt=attempt, limit=limit, cursor=cursor
    )


@router.get("/stages/{stage}/steps/{step}/groups", response_model=GroupsOut)
def step_groups(
    _: Reader,
    run: RunRef,
    stage: str,
    step: WholeNumber,
    session: ReadSession,
    store: AppStore,
    attempt: Attempt = None,
) -> dict[str, Any]:
    """The groups that one step trained on: rewards, mean, deviation, why dropped."""
    return {"items": service.step_groups(session, store, get_run(session, run), stage, step, attempt)}


@router.get("/attempts/{attempt}/batches/{batch}/groups/{index}")
def get_group(
    _: Reader,
    run: RunRef,
    attempt: WholeNumber,
    batch: WholeNumber,
    index: int,
    session: ReadSession,
    store: AppStore,
) -> GroupDetail:
    """One prompt's completions with reward parts and advantages as the arithmetic they are."""
    return service.group(session, store, get_run(session, run), attempt, batch, index)


@router.get(
    "/attempts/{attempt}/batches/{batch}/groups/{index}/completions/{completion}/tokens", response_model=TokensOut
)
def get_tokens(
    _: Reader,
    run: RunRef,
    attempt: WholeNumber,
    batch: WholeNumber,
    index: int,
    completion: int,
    session: ReadSession,
    store: AppStore,
) -> dict[str, Any]:
    """The tokens of one completion with log-probabilities in nats and, in PPO, value, return and advantage."""
    found = completion_tokens(session, store, get_run(session, run), attempt, batch, index, completion)
    return {"items": found}


@router.get("/rollouts/search", response_model=SearchOut)
def search(
    _: Reader,
    run: RunRef,
    session: ReadSession,
    store: AppStore,
    text: Annotated[str | None, Query(max_length=1000, description="Contained, upper and lower case alike")] = None,
    where: Literal["completion", "prompt", "both"] = "both",
    min_reward: Annotated[float | None, Query(allow_inf_nan=False)] = None,
    max_reward: Annotated[float | None, Query(allow_inf_nan=False)] = None,
    zero_part: Annotated[str | None, Query(description="Reward part whose value is 0")] = None,
    behaviour: Annotated[str | None, Query(description="Shown at least once, such as reflection")] = None,
    truncated: bool | None = None,
    prompt_id: Annotated[str | None, Query(description="One prompt through training")] = None,
    stage: str | None = None,
    attempt: WholeNumber | None = None,
    limit: Limit = 50,
    cursor: str | None = None,
) -> SearchPage:
    """Search every completion of the run. A page may be short and still have a `next_cursor`."""
    filters = SearchFilters(
        text, where, min_reward, max_reward, zero_part, behaviour, truncated, prompt_id, stage, attempt
    )
    return search_rollouts(session, store, get_run(session, run), filters, limit=limit, cursor=cursor)
