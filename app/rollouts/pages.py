"""Pages of rollouts: the steps and the search of a run, the groups of a step, the completions of a group."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import Request
from fastapi.responses import Response
from sqlalchemy import select, tuple_
from sqlalchemy.orm import Session

from app.errors import BadRequest, NotFound
from app.models import Attempt, Point, RolloutBatch, Run, Series
from app.rollouts import service
from app.rollouts.batches import get_batch
from app.rollouts.searching import Hit, SearchFilters, search
from app.rollouts.service import GroupDetail, GroupSummary
from app.rollouts.views import LOGPROB_CLASSES, GroupView, TokenView, group_view, token_views
from app.runs.frame import Frame, build_frame
from app.runs.service import get_run
from app.runs.side import group_url
from app.security import Reader, allowed
from app.sessions import AppStore, ReadSession
from app.web import page, pages_router

router = pages_router()
STEPS_A_PAGE = 60
SHOWN_METRICS = ("reward/mean", "groups/zero_variance_share")


# ---------------------------------------------------------------- rollouts tab
@dataclass(frozen=True)
class RolloutQuery:
    text: str
    min_reward: str
    max_reward: str
    zero_part: str
    truncated: bool
    prompt_id: str


@dataclass(frozen=True)
class StepRow:
    href: str
    stage: str
    step: int | None
    batch: int
    attempt: int
    num_groups: int
    num_completions: int
    mean_reward: float | None
    zero_variance: float | None
    repeated: bool
    """A later attempt trained this step again."""


@dataclass(frozen=True)
class HitRow:
    hit: Hit
    href: str
    tone: str


@dataclass(frozen=True)
class RolloutsContext:
    frame: Frame
    query: RolloutQuery
    searching: bool
    part_names: list[str]
    problem: str
    hits: list[HitRow]
    num_missing: int
    steps: list[StepRow]
    next_href: str


@router.get("/runs/{number}/rollouts")
def rollouts(
    request: Request,
    user: Reader,
    session: ReadSession,
    store: AppStore,
    number: str,
    text: str = "",
    min_reward: str = "",
    max_reward: str = "",
    zero_part: str = "",
    truncated: bool = False,
    prompt_id: str = "",
    cursor: str | None = None,
    before: str = "",
) -> Response:
    run = get_run(session, number)
    query = RolloutQuery(text, min_reward, max_reward, zero_part, truncated, prompt_id.strip())
    searching = query != RolloutQuery("", "", "", "", False, "")
    frame = build_frame(session, store, run, tab="rollouts", can_run=allowed(user, "run"))
    problem, hits, missing, steps, next_href = "", [], 0, [], ""
    if searching:
        problem, filters = _filters(query)
        if filters is not None:
            found = search(session, store, run, filters, cursor=cursor)
            hits, missing = [_hit_row(run, hit) for hit in found.items], found.num_missing
            next_href = _search_href(frame.url, query, found.next_cursor)
    else:
        steps, next_href = _steps(session, run, before)
    names = part_names(session, run)
    context = RolloutsContext(frame, query, searching, names, problem, hits, missing, steps, next_href)
    return page(request, "runs/rollouts.html", context, status=422 if problem else 200)


def _filters(query: RolloutQuery) -> tuple[str, SearchFilters | None]:
    bounds: dict[str, float | None] = {}
    for name in ("min_reward", "max_reward"):
        text = getattr(query, name).strip().replace("−", "-").replace(",", ".")
        try:
            bounds[name] = float(text) if text else None
        except ValueError:
            return f"{text!r} is not a reward; write a number such as 0.5.", None
    filters = SearchFilters(
        text=query.text or None,
        where="completion",
        min_reward=bounds["min_reward"],
        max_reward=bounds["max_reward"],
        zero_part=query.zero_part or None,
        truncated=True if query.truncated else None,
        prompt_id=query.prompt_id or None,
    )
    return "", filters


def _hit_row(run: Run, hit: Hit) -> HitRow:
    href = group_url(run.number, hit.attempt, hit.batch, hit.group) + f"#completion-{hit.completion}"
    return HitRow(hit, href, tone_of(hit.advantage))


def tone_of(advantage: float | None) -> str:
    return "good" if advantage and advantage > 0 else "bad" if advantage and advantage < 0 else "sub"


def _search_href(url: str, query: RolloutQuery, cursor: str | None) -> str:
    if cursor is None:
        return ""
    values = {k: v for k, v in vars(query).items() if v and k != "truncated"} | (
        {"truncated": "1"} if query.truncated else {}
    )
    return f"{url}/rollouts?{urlencode({**values, 'cursor': cursor})}"


def part_names(session: Session, run: Run) -> list[str]:
    """Reward parts of the run's stages, as the journal names them."""
    query = select(Series.name).distinct().join(Attempt, Attempt.id == Series.attempt_id)
    rows = session.scalars(query.where(Attempt.run_id == run.id, Series.name.like("reward/part/%/mean")))
    return sorted(name.split("/")[2] for name in rows)


def _steps(session: Session, run: Run, before: str) -> tuple[list[StepRow], str]:
    """Batches newest first, a page at a time; `before` is `attempt-batch` of the last one seen."""
    query = select(RolloutBatch, Attempt.number).join(Attempt, Attempt.id == RolloutBatch.attempt_id)
    query = query.where(Attempt.run_id == run.id).order_by(Attempt.number.desc(), RolloutBatch.batch.desc())
    if before:
        query = query.where(tuple_(Attempt.number, RolloutBatch.batch) < tuple_(*_numbers(before, 2)))
    batches = list(session.execute(query.limit(STEPS_A_PAGE + 1)))
    shown = batches[:STEPS_A_PAGE]
    values = _step_values(session, [batch for batch, _ in shown])
    newest = _newest_attempts(session, run, [batch for batch, _ in shown])
    rows = [_step_row(run, batch, attempt, values, newest) for batch, attempt in shown]
    last = f"{shown[-1][1]}-{shown[-1][0].batch}" if len(batches) > len(shown) else ""
    return rows, f"/runs/{run.number}/rollouts?before={last}" if last else ""


def _step_row(
    run: Run, batch: RolloutBatch, attempt: int, values: Mapping[Any, float | None], newest: Mapping[Any, int]
) -> StepRow:
    href = f"/runs/{run.number}/steps/{quote(batch.stage)}/{batch.step}?attempt={attempt}"
    key = (batch.attempt_id, batch.stage, batch.step)
    return StepRow(
        href=href if batch.step is not None else group_url(run.number, attempt, batch.batch, 0),
        stage=batch.stage,
        step=batch.step,
        batch=batch.batch,
        attempt=attempt,
        num_groups=batch.num_groups,
        num_completions=batch.num_completions,
        mean_reward=values.get((*key, SHOWN_METRICS[0])),
        zero_variance=values.get((*key, SHOWN_METRICS[1])),
        repeated=batch.step is not None and newest.get((batch.stage, batch.step), attempt) > attempt,
    )


def _step_values(session: Session, batches: list[RolloutBatch]) -> dict[Any, float | None]:
    steps = {batch.step for batch in batches if batch.step is not None}
    query = select(Series.attempt_id, Series.stage, Point.step, Series.name, Point.value)
    query = query.join(Point, Point.series_id == Series.id).where(
        Series.attempt_id.in_({batch.attempt_id for batch in batches}),
        Series.name.in_(SHOWN_METRICS),
        Point.step.in_(steps),
    )
    rows = session.execute(query)
    return {(attempt, stage, step, name): value for attempt, stage, step, name, value in rows}


def _newest_attempts(session: Session, run: Run, batches: list[RolloutBatch]) -> dict[Any, int]:
    """Newest attempt that trained each of these steps."""
    steps = {batch.step for batch in batches if batch.step is not None}
    query = select(RolloutBatch.stage, RolloutBatch.step, Attempt.number).join(
        Attempt, Attempt.id == RolloutBatch.attempt_id
    )
    rows = session.execute(query.where(Attempt.run_id == run.id, RolloutBatch.step.in_(steps)).order_by(Attempt.number))
    return {(stage, step): number for stage, step, number in rows}


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
    step: int,
    attempt: int | None = None,
) -> Response:
    run = get_run(session, number)
    groups = service.step_groups(session, store, run, stage, step, attempt)
    rewards = [reward for group in groups for reward in group.rewards if reward is not None]
    low, high = min([0.0, *rewards]), max([0.0, *rewards])
    rows = [_group_row(run, group, low, high) for group in groups]
    shown = groups[0].attempt
    near = _neighbours(session, run, stage, step, shown)
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


def _neighbours(session: Session, run: Run, stage: str, step: int, attempt: int) -> tuple[int | None, int | None]:
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
    attempt, batch, index = _numbers(place, 3)
    group = service.group(session, store, run, attempt, batch, index)
    view = group_view(group)
    selected = view.best if tokens is None else tokens
    shown = service.tokens(session, store, run, attempt, batch, index, selected) if tokens is not None else []
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


def _numbers(text: str, count: int) -> tuple[int, ...]:
    parts = text.split("-")
    if len(parts) != count or not all(part.isdecimal() and len(part) < 10 for part in parts):
        raise BadRequest(f"{text[:40]!r} names no place in the rollouts.")
    return tuple(int(part) for part in parts)
