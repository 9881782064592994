"""Pages: replays of a run, and what one of them says would have changed."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Form, Request
from fastapi.responses import Response
from sqlalchemy.orm import Session

from app.errors import AppError
from app.formatting import fixed, percent, signed
from app.models import Replay, RolloutBatch, Run
from app.rewards import playground, replays
from app.rollouts.batches import batch_query
from app.runs.service import get_run
from app.runs.side import group_url
from app.security import Reader, Runner
from app.sessions import AppDatabase, AppSettings, AppStore, ReadSession, WriteSession
from app.web import page, pages_router, redirect
from app.yaml_text import yaml_text
from grpo_engine.errors import Problem

router = pages_router()


@dataclass(frozen=True)
class ReplaysContext:
    run: Run
    replays: list[Replay]
    stages: list[str]
    stage: str
    yaml: str
    problems: list[Problem]
    failure: str


@dataclass(frozen=True)
class Figure:
    label: str
    value: str
    help: str


@dataclass(frozen=True)
class PartRow:
    name: str
    old: str
    new: str
    old_abstained: str
    new_abstained: str
    versions: str


@dataclass(frozen=True)
class Example:
    href: str
    place: str
    prompt: str
    gold: str | None
    text: str
    rewards: str
    advantages: str
    parts: list[tuple[str, str, str, str]]
    """Name, old value, new value, why the new one."""


@dataclass(frozen=True)
class ReplayContext:
    run: Run
    replay: Replay
    yaml: str
    figures: list[Figure]
    parts: list[PartRow]
    examples: list[Example]


# ---------------------------------------------------------------- all of a run
@router.get("/runs/{number}/replays")
def list_replays(request: Request, _: Reader, session: ReadSession, number: str) -> Response:
    run = get_run(session, number)
    return page(request, "rewards/replays.html", _context(session, run, "", _own_rewards(run), [], ""))


@router.post("/runs/{number}/replays")
def start_replay(
    request: Request,
    user: Runner,
    session: WriteSession,
    database: AppDatabase,
    store: AppStore,
    settings: AppSettings,
    number: str,
    yaml: Annotated[str, Form()] = "",
    stage: Annotated[str, Form()] = "",
) -> Response:
    run, text = get_run(session, number), yaml.replace("\r\n", "\n")
    try:
        row = replays.create(session, replays.Job(database, store, settings), user, run, text, stage or None)
    except AppError as error:
        failure = "" if error.problems else error.detail
        context = _context(session, run, stage, text, error.problems, failure)
        return page(request, "rewards/replays.html", context, status=error.status)
    return redirect(f"/runs/{run.number}/replays/{row.id}")


def _context(
    session: Session, run: Run, stage: str, yaml: str, problems: list[Problem], failure: str
) -> ReplaysContext:
    query = batch_query(run).with_only_columns(RolloutBatch.stage).order_by(None).distinct()
    stages = sorted(session.scalars(query))
    return ReplaysContext(run, replays.list_replays(session, run), stages, stage, yaml, problems, failure)


def _own_rewards(run: Run) -> str:
    """The rewards of the run's last stage that has any, to be changed."""
    for stage in reversed(run.config["stages"]):
        if "rewards" in stage:
            return yaml_text(playground.rewards_of_stage(stage))
    return ""


# ---------------------------------------------------------------- one
@router.get("/runs/{number}/replays/{replay_id}")
def show(request: Request, _: Reader, session: ReadSession, number: str, replay_id: uuid.UUID) -> Response:
    run = get_run(session, number)
    row = replays.get_replay(session, run, replay_id)
    told = row.summary
    context = ReplayContext(
        run=run,
        replay=row,
        yaml=yaml_text(row.config),
        figures=_figures(told) if told else [],
        parts=[_part_row(name, part) for name, part in told["parts"].items()] if told else [],
        examples=[_example(run, one) for one in told["examples"]] if told else [],
    )
    return page(request, "rewards/replay.html", context)


def _figures(told: dict[str, Any]) -> list[Figure]:
    flat = f"{percent(told['old_flat_share'])} → {percent(told['new_flat_share'])}"
    means = f"{fixed(told['old_mean_reward'])} → {fixed(told['new_mean_reward'])}"
    zero = f"{percent(told['became_zero_share'])} · {percent(told['became_nonzero_share'])}"
    return [
        Figure("rank correlation", fixed(told["rank_correlation"]), "Spearman's, within groups; mean over "
               f"{told['num_correlated']:,} groups with variance before and after"),
        Figure("advantages that change sign", percent(told["sign_changed_share"]),
               f"of {told['num_completions']:,} completions"),
        Figure("best completion is another", percent(told["best_changed_share"]), f"of {told['num_groups']:,} groups"),
        Figure("mean reward", means, "before and after"),
        Figure("groups without variance", flat, "before and after"),
        Figure("advantages that become 0 · cease to be 0", zero, "of all completions"),
    ]  # fmt: skip


def _part_row(name: str, part: dict[str, Any]) -> PartRow:
    old, new = part["old_versions"], part["new_versions"]
    versions = ", ".join(old or ["–"]) if old == new else f"{', '.join(old or ['–'])} → {', '.join(new or ['–'])}"
    before, after = f"{part['old_abstained']:,}", f"{part['new_abstained']:,}"
    return PartRow(name, fixed(part["old_mean"]), fixed(part["new_mean"]), before, after, versions)


def _example(run: Run, one: dict[str, Any]) -> Example:
    place = f"batch {one['batch']}, group {one['group'] + 1}, completion {one['completion'] + 1}"
    href = group_url(run.number, one["attempt"], one["batch"], one["group"]) + f"#completion-{one['completion']}"
    old = {part["name"]: part for part in one["old_parts"]}
    new = {part["name"]: part for part in one["new_parts"]}
    return Example(
        href=href,
        place=place,
        prompt=one["prompt"],
        gold=one["gold"],
        text=one["text"],
        rewards=f"{fixed(one['old_reward'])} → {fixed(one['new_reward'])}",
        advantages=f"{signed(one['old_advantage'])} → {signed(one['new_advantage'])}",
        parts=[(name, _value(old.get(name)), _value(new.get(name)), _why(new.get(name))) for name in old | new],
    )


def _value(part: dict[str, Any] | None) -> str:
    return "–" if part is None else "abstained" if part["value"] is None else fixed(part["value"])


def _why(part: dict[str, Any] | None) -> str:
    return "left out" if part is None else part["explanation"]
