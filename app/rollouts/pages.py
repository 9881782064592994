"""Pages of rollouts: the groups of a step, the completions of a group."""

from __future__ import annotations

import math
from dataclasses import dataclass
from urllib.parse import quote, urlencode

from fastapi import Request
from fastapi.responses import Response
from sqlalchemy import select
from sqlalchemy.orm import Session

from app.errors import BadRequest, NotFound
from app.models import Attempt, RolloutBatch, Run
from app.paging import WholeNumber
from app.rollouts import service
from app.rollouts.batches import get_batch
from app.rollouts.service import GroupDetail, GroupSummary
from app.rollouts.tokens import tokens as completion_tokens
from app.rollouts.views import LOGPROB_CLASSES, GroupView, TokenView, group_view, token_views
from app.runs.service import get_run
from app.runs.side import group_url
from app.security import Reader
from app.sessions import AppStore, ReadSession
from app.web import page, pages_router

router = pages_router()


# ---------------------------------------------------------------- step
@dataclass(frozen=True)
class RewardBar:
    x: float
    y: float
    height: float
    css: str


@dataclass(frozen=True)
class GroupRow:
    group: GroupSummary
    href: str
    bars: list[RewardBar]
    width: int


@dataclass(frozen=True)
class StepContext:
    run: Run
    stage: str
    step: int
    attempt: int
    attempts: list[int]
    groups: list[GroupRow]
    num_completions: int
    mean_reward: float | None
    num_flat: int
    num_truncated: int
    previous_href: str
    next_href: str


@router.get("/runs/{number}/steps/{stage}/{step}")
def step_page(
    request: Request,
    _: Reader,
    session: ReadSession,
    store: AppStore,
    number: str,
    stage: str,
    step: WholeNumber,
    attempt: WholeNumber | None = None,
) -> Response:
    run = get_run(session, number)
    groups = service.step_groups(session, store, run, stage, step, attempt)
    rewards = [reward for group in groups for reward in group.rewards if reward is not None]
    low, high = min([0.0, *rewards]), max([0.0, *rewards])
    rows = [_group_row(run, group, low, high) for group in groups]
    shown = groups[0].attempt
    near = _neighbours(session, run, stage, step)
    context = StepContext(
        run=run,
        stage=stage,
        step=step,
        attempt=shown,
        attempts=_attempts_of_step(session, run, stage, step),
        groups=rows,
        num_completions=sum(len(group.rewards) for group in groups),
        mean_reward=math.fsum(rewards) / len(rewards) if rewards else None,
        num_flat=sum(group.std is None or group.std < 1e-6 * max(1.0, abs(group.mean or 0.0)) for group in groups),
        num_truncated=sum(group.num_truncated for group in groups),
        previous_href=_step_href(run, stage, near[0]),
        next_href=_step_href(run, stage, near[1]),
    )
    return page(request, "rollouts/step.html", context)


def _step_href(run: Run, stage: str, step: int | None) -> str:
    return f"/runs/{run.number}/steps/{quote(stage)}/{step}" if step is not None else ""


def _group_row(run: Run, group: GroupSummary, low: float, high: float) -> GroupRow:
    """A group with its rewards as small bars, all on one scale."""
    span = (high - low) or 1.0
    zero = 20 * high / span
    bars = []
    for index, reward in enumerate(group.rewards):
        top = 20 * (high - (reward or 0.0)) / span
        height = max(1.0, abs(top - zero))
        bars.append(
            RewardBar(
                index * 6, min(top, zero - 1.0 if height == 1.0 else zero), height, "" if reward is None else "p0"
            )
        )
    return GroupRow(group, group_url(run.number, group.attempt, group.batch, group.index), bars, 6 * len(bars))


def _attempts_of_step(session: Session, run: Run, stage: str, step: int) -> list[int]:
    query = select(Attempt.number).distinct().join(RolloutBatch, RolloutBatch.attempt_id == Attempt.id)
    where = (Attempt.run_id == run.id, RolloutBatch.stage == stage, RolloutBatch.step == step)
    return list(session.scalars(query.where(*where).order_by(Attempt.number)))


def _neighbours(session: Session, run: Run, stage: str, step: int) -> tuple[int | None, int | None]:
    query = select(RolloutBatch.step).join(Attempt, Attempt.id == RolloutBatch.attempt_id)
    query = query.where(Attempt.run_id == run.id, RolloutBatch.stage == stage)
    before = session.scalar(query.where(RolloutBatch.step < step).order_by(RolloutBatch.step.desc()).limit(1))
    after = session.scalar(query.where(RolloutBatch.step > step).order_by(RolloutBatch.step).limit(1))
    return before, after


# ---------------------------------------------------------------- group
@dataclass(frozen=True)
class GroupContext:
    run: Run
    group: GroupDetail
    view: GroupView
    url: str
    place: int
    num_groups: int
    step_href: str
    previous_href: str
    next_href: str
    prompt_href: str
    playground_href: str
    columns: list[tuple[str, str]]
    selected: int
    tokens: list[TokenView]
    bounds: tuple[float, ...]


@router.get("/runs/{number}/groups/{place}")
def group_page(
    request: Request,
    _: Reader,
    session: ReadSession,
    store: AppStore,
    number: str,
    place: str,
    tokens: int | None = None,
) -> Response:
    run = get_run(session, number)
    attempt, batch, index = place_numbers(place, 3)
    group = service.group(session, store, run, attempt, batch, index)
    view = group_view(group)
    selected = view.best if tokens is None else tokens
    shown = completion_tokens(session, store, run, attempt, batch, index, selected) if tokens is not None else []
    near = _near_groups(session, run, group)
    stage, step = group.batch.stage, group.batch.step
    context = GroupContext(
        run=run,
        group=group,
        view=view,
        url=group_url(run.number, attempt, batch, index),
        place=index + 1,
        num_groups=group.batch.num_groups,
        step_href=f"{_step_href(run, stage, step)}?attempt={attempt}" if step is not None else "",
        previous_href=near[0],
        next_href=near[1],
        prompt_href=f"/runs/{run.number}/rollouts?{urlencode({'prompt_id': group.prompt_id})}",
        playground_href=f"/rewards/playground?run={run.number}&place={place}",
        columns=[(name, str(value)) for name, value in group.columns.items() if name != "answer"],
        selected=selected,
        tokens=token_views(shown),
        bounds=LOGPROB_CLASSES,
    )
    block = "tokens" if request.headers.get("HX-Target", "").endswith("#tokens") else None
    return page(request, "rollouts/group.html", context, block=block)


def _near_groups(session: Session, run: Run, group: GroupDetail) -> tuple[str, str]:
    """The groups before and after it, across batches of the attempt."""
    attempt, batch, index = group.batch.attempt, group.batch.batch, group.index
    previous = (
        group_url(run.number, attempt, batch, index - 1)
        if index
        else _end_of(session, run, attempt, batch - 1, last=True)
    )
    if index + 1 < group.batch.num_groups:
        return previous, group_url(run.number, attempt, batch, index + 1)
    return previous, _end_of(session, run, attempt, batch + 1, last=False)


def _end_of(session: Session, run: Run, attempt: int, batch: int, *, last: bool) -> str:
    try:
        view = get_batch(session, run, attempt, batch)
    except NotFound:
        return ""
    return group_url(run.number, attempt, batch, view.num_groups - 1 if last else 0)


def place_numbers(text: str, count: int) -> tuple[int, ...]:
    parts = text.split("-")
    if len(parts) != count or not all(part.isdecimal() and len(part) < 10 for part in parts):
        raise BadRequest(f"{text[:40]!r} names no place in the rollouts.")
    return tuple(int(part) for part in parts)
