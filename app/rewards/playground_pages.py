"""Page: paste prompt, completion and gold, and see what every part of a reward says about them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.responses import Response
from sqlalchemy.orm import Session

from app.errors import AppError, Invalid
from app.models import Run
from app.rewards import playground
from app.rewards.playground import CHOICES, Judged
from app.rollouts import service as rollouts
from app.rollouts.pages import place_numbers
from app.runs.progress import stage_index
from app.runs.service import get_run
from app.security import Reader, Runner
from app.sessions import AppDatabase, AppSettings, AppStore, ReadSession
from app.web import page, pages_router
from app.yaml_text import yaml_text
from grpo_engine.errors import Problem

router = pages_router()
TEMPLATE = "rewards/playground.html"
DEFAULT_PARTS = ("accuracy", "format", "step_validity", "logical_consistency", "repetition")


@dataclass(frozen=True)
class Draft:
    """What stands in the form."""

    prompt: str = ""
    completion: str = ""
    gold: str = ""
    columns: str = ""
    """The other columns of the dataset row, JSON."""
    parts: tuple[str, ...] = DEFAULT_PARTS
    yaml: str = ""
    """Parts as YAML; when there is any, the boxes do not count."""
    source: str = ""
    """Where the completion is from, in words."""


EXAMPLE = Draft(
    prompt="Natalia sold 48 clips in April and half as many in May. How many did she sell in all?\n<think>",
    completion="In May she sold 48 / 2 = 24 clips.\nWait, let me check: 24 * 2 = 48.\nIn all, 48 + 24 = 72."
    "</think>She sold \\boxed{72} clips.",
    gold="72",
)


@dataclass(frozen=True)
class PlaygroundContext:
    draft: Draft
    choices: list[str]
    judged: Judged | None
    problems: list[Problem]
    failure: str


async def posted_draft(request: Request) -> Draft:
    form = await request.form()
    texts = {
        name: str(form.get(name, "")).replace("\r\n", "\n") for name in ("prompt", "completion", "columns", "yaml")
    }
    parts = tuple(kind for kind in CHOICES if kind in form.getlist("part"))
    return Draft(gold=str(form.get("gold", "")).strip(), parts=parts, **texts)


@router.get("/rewards/playground")
def show(
    request: Request,
    _: Reader,
    session: ReadSession,
    store: AppStore,
    run: str = "",
    place: str = "",
    completion: int = 0,
) -> Response:
    """Empty but for an example, or filled from a stored rollout: `run`, `place` (attempt-batch-group), `completion`."""
    draft = EXAMPLE
    if run and place:
        draft = _stored(session, store, get_run(session, run), place, completion)
    return page(request, TEMPLATE, PlaygroundContext(draft, list(CHOICES), None, [], ""))


@router.post("/rewards/playground")
def judge(
    request: Request,
    user: Runner,
    database: AppDatabase,
    settings: AppSettings,
    draft: Annotated[Draft, Depends(posted_draft)],
) -> Response:
    """Nothing is kept: the answer is the page with every part's judgement."""
    context = PlaygroundContext(draft, list(CHOICES), None, [], "")
    try:
        config = playground.read_rewards(draft.yaml) if draft.yaml.strip() else _chosen(draft.parts)
        columns = playground.read_columns(draft.columns, draft.gold)
        with database.read() as session:
            sources = playground.check_parts(session, user, config)
        item = {"prompt": draft.prompt, "completion": draft.completion, "columns": columns}
        judged = playground.judge(settings, config, sources, item)
    except AppError as error:
        failure = "" if error.problems else error.detail
        return page(request, TEMPLATE, replace(context, problems=error.problems, failure=failure), status=error.status)
    return page(request, TEMPLATE, replace(context, judged=judged))


def _chosen(parts: tuple[str, ...]) -> dict[str, Any]:
    if not parts:
        raise Invalid.of([Problem("rewards", "", "no part is chosen", "tick one, or write parts as YAML")])
    return {"rewards": [CHOICES[kind] for kind in parts]}


def _stored(session: Session, store: AppStore, run: Run, place: str, completion: int) -> Draft:
    """A completion of a run with its dataset row and the rewards of its stage. Raises NotFound."""
    group = rollouts.group(session, store, run, *place_numbers(place, 3))
    row = group.completions[min(max(completion, 0), len(group.completions) - 1)]
    config = playground.rewards_of_stage(run.config["stages"][stage_index(group.batch.stage)])
    columns = json.dumps(group.columns, ensure_ascii=False, indent=1)
    source = f"run {run.number}, group {place}, completion {row.index + 1}"
    return Draft(group.prompt_text, row.text, "", columns, (), yaml_text(config), source)
