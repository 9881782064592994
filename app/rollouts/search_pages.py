"""Tab of a run's rollouts: its steps, and the search over every completion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import Request
from fastapi.responses import Response
from sqlalchemy import select, tuple_
from sqlalchemy.orm import Session

from app.models import Attempt, Point, RolloutBatch, Run, Series
from app.rollouts.pages import place_numbers
from app.rollouts.searching import Hit, SearchFilters, search
from app.runs.frame import Frame, build_frame
from app.runs.service import get_run
from app.runs.side import group_url
from app.security import Reader, allowed
from app.sessions import AppStore, ReadSession
from app.web import page, pages_router
from grpo_engine.reward.behaviours import BEHAVIOURS

router = pages_router()
STEPS_A_PAGE = 60
SHOWN_METRICS = ("reward/mean", "groups/zero_variance_share")


@dataclass(frozen=True)
class RolloutQuery:
    text: str
    min_reward: str
    max_reward: str
    zero_part: str
    behaviour: str
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
    behaviours: tuple[str, ...]
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
    behaviour: str = "",
    truncated: bool = False,
    prompt_id: str = "",
    cursor: str | None = None,
    before: str = "",
) -> Response:
    run = get_run(session, number)
    query = RolloutQuery(text, min_reward, max_reward, zero_part, behaviour, truncated, prompt_id.strip())
    searching = query != RolloutQuery("", "", "", "", "", False, "")
    frame = build_frame(session, store, run, tab="rollouts", can_run=allowed(user, "run"))
    problem, missing, next_href = "", 0, ""
    hits: list[HitRow] = []
    steps: list[StepRow] = []
    if searching:
        problem, filters = _filters(query)
        if filters is not None:
            found = search(session, store, run, filters, cursor=cursor)
            hits, missing = [_hit_row(run, hit) for hit in found.items], found.num_missing
            next_href = _search_href(frame.url, query, found.next_cursor)
    else:
        steps, next_href = _steps(session, run, before)
    names = part_names(session, run)
    context = RolloutsContext(frame, query, searching, names, BEHAVIOURS, problem, hits, missing, steps, next_href)
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
        behaviour=query.behaviour or None,
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
        query = query.where(tuple_(Attempt.number, RolloutBatch.batch) < tuple_(*place_numbers(before, 2)))
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
