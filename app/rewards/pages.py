"""Pages: registered reward sources and the form that registers one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Form, Request
from fastapi.responses import Response

from app.errors import Invalid
from app.models import RewardSource
from app.rewards import service
from app.security import Coder, Reader
from app.sessions import ReadSession, WriteSession
from app.web import page, pages_router, redirect
from grpo_engine.errors import Problem

router = pages_router()

EXAMPLE = '''def reward(completions, **columns):
    """1 for a completion that names the answer, None to abstain."""
    return [float(answer in text) for text, answer in zip(completions, columns["answer"])]
'''


@dataclass(frozen=True)
class RewardsContext:
    sources: list[RewardSource]
    name: str
    source: str
    problems: list[Problem]


@dataclass(frozen=True)
class RewardContext:
    name: str
    versions: list[RewardSource]
    shown: RewardSource


@router.get("/rewards")
def list_rewards(request: Request, _: Reader, session: ReadSession) -> Response:
    context = RewardsContext(service.list_sources(session), "", EXAMPLE, [])
    return page(request, "rewards/list.html", context)


@router.post("/rewards")
def register(
    request: Request,
    user: Coder,
    session: WriteSession,
    name: Annotated[str, Form()] = "",
    source: Annotated[str, Form()] = "",
) -> Response:
    source = source.replace("\r\n", "\n")
    try:
        row = service.register(session, user, name.strip(), source)
    except Invalid as error:
        context = RewardsContext(service.list_sources(session), name, source, error.problems)
        return page(request, "rewards/list.html", context, status=422)
    return redirect(f"/rewards/{row.name}", f"{row.name} is registered as {row.hash[:10]}.")


@router.get("/rewards/{name}")
def show(request: Request, _: Reader, session: ReadSession, name: str, hash: str | None = None) -> Response:
    shown = service.get_source(session, name, hash)
    return page(request, "rewards/show.html", RewardContext(name, service.list_sources(session, name), shown))
