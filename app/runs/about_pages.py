"""Tabs of a run that say what happened and on what: log and config."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from fastapi import Request
from fastapi.responses import Response
from sqlalchemy.orm import Session

from app.models import Checkpoint, NamedConfig, Run, User
from app.paging import WholeNumber
from app.runs import log_view, service
from app.runs.frame import Frame
from app.runs.pages import framed
from app.security import Reader
from app.sessions import AppStore, ReadSession
from app.web import page, pages_router
from app.yaml_text import yaml_text

router = pages_router()


# ---------------------------------------------------------------- log
@router.get("/runs/{number}/log")
def log(
    request: Request,
    user: Reader,
    session: ReadSession,
    store: AppStore,
    number: str,
    search: str = "",
    attempt: WholeNumber | None = None,
) -> Response:
    run = service.get_run(session, number)
    frame = framed(session, store, run, user, "log")
    context = log_view.build(session, store, run, frame, search.strip(), attempt)
    return page(request, "runs/log.html", context)


@router.get("/runs/{number}/attempts/{attempt}/engine.log")
def download_log(_: Reader, session: ReadSession, store: AppStore, number: str, attempt: WholeNumber) -> Response:
    run = service.get_run(session, number)
    return log_view.download(store, run, service.get_attempt(session, run, attempt))


# ---------------------------------------------------------------- config
@dataclass(frozen=True)
class ConfigContext:
    frame: Frame
    yaml: str
    config_hash: str
    git_commit: str | None
    config_href: str
    config_name: str
    parent_href: str
    parent_label: str
    parent_text: str
    reward_sources: list[tuple[str, str]]
    owner: str
    created_at: datetime
    versions: list[tuple[str, str]]


@router.get("/runs/{number}/config")
def config(request: Request, user: Reader, session: ReadSession, store: AppStore, number: str) -> Response:
    run = service.get_run(session, number)
    named = session.get(NamedConfig, run.config_id) if run.config_id else None
    owner = session.get(User, run.owner_id) if run.owner_id else None
    started = service.newest_event(session, run, "started")
    parent = _parent(session, run)
    context = ConfigContext(
        frame=framed(session, store, run, user, "config"),
        yaml=yaml_text(run.config),
        config_hash=run.config_hash,
        git_commit=run.git_commit or (started.payload.get("git_commit") if started else None),
        config_href=f"/configs/{named.name}/{named.version}" if named else "",
        config_name=f"{named.name}, version {named.version}" if named else "",
        parent_href=parent[0],
        parent_label=parent[1],
        parent_text=parent[2],
        reward_sources=sorted(run.reward_sources.items()),
        owner=owner.name if owner else "import" if run.imported else "–",
        created_at=run.created_at,
        versions=sorted((started.payload.get("versions") or {}).items()) if started else [],
    )
    return page(request, "runs/config.html", context)


def _parent(session: Session, run: Run) -> tuple[str, str, str]:
    checkpoint = session.get(Checkpoint, run.parent_checkpoint_id) if run.parent_checkpoint_id else None
    origin = session.get(Run, run.parent_run_id) if run.parent_run_id else None
    if checkpoint is not None:
        where = f"#{origin.number}, " if origin else ""
        return (
            f"/checkpoints/{checkpoint.id}",
            "starts at checkpoint",
            f"{where}{checkpoint.stage}, step {checkpoint.step}",
        )
    return (f"/runs/{origin.number}", "cloned from", f"#{origin.number}") if origin else ("", "", "")


@router.get("/runs/{number}/config.yaml")
def download_config(_: Reader, session: ReadSession, number: str) -> Response:
    run = service.get_run(session, number)
    disposition = f'attachment; filename="run-{run.number}.yaml"'
    return Response(yaml_text(run.config), media_type="application/yaml", headers={"Content-Disposition": disposition})
