"""Pages of named configs: the list, their versions, one version, a comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from sqlalchemy.orm import Session

from app.configs import service
from app.configs.service import ConfigSummary, Preset
from app.models import NamedConfig
from app.security import Reader
from app.sessions import ReadSession
from app.web import page, pages_router
from app.yaml_text import flow_text, yaml_text

router = pages_router()


@dataclass(frozen=True)
class ConfigsContext:
    configs: list[ConfigSummary]
    presets: list[Preset]


@dataclass(frozen=True)
class ConfigContext:
    shown: NamedConfig
    yaml: str
    versions: list[NamedConfig]


@dataclass(frozen=True)
class ChangeRow:
    path: str
    before: str
    after: str
    sign: str
    """+ added, − removed, empty when both have it."""


@dataclass(frozen=True)
class DiffContext:
    before: str
    after: str
    changes: list[ChangeRow]
    choices: list[str]
    asked: bool


@router.get("/configs")
def list_configs(request: Request, _: Reader, session: ReadSession) -> Response:
    return page(request, "configs/list.html", ConfigsContext(service.list_configs(session), service.presets()))


@router.get("/configs/diff")
def diff(request: Request, _: Reader, session: ReadSession, before: str = "", after: str = "") -> Response:
    """Two configs, each `name@version`, `name`, `preset:name` or `run:number`."""
    asked = bool(before and after)
    changes = service.diff(service.referenced(session, before), service.referenced(session, after)) if asked else []
    context = DiffContext(before, after, [_change(change) for change in changes], _choices(session), asked)
    return page(request, "configs/diff.html", context)


def _choices(session: Session) -> list[str]:
    saved = [
        f"{row.name}@{row.version}"
        for summary in service.list_configs(session)
        for row in service.list_versions(session, summary.name)
    ]
    return saved + [f"preset:{preset.name}" for preset in service.presets()]


def _change(change: service.Change) -> ChangeRow:
    sign = "+" if change.before == service.MISSING else "−" if change.after == service.MISSING else ""
    return ChangeRow(change.path, _text(change.before), _text(change.after), sign)


def _text(value: Any) -> str:
    if value == service.MISSING:
        return service.MISSING
    return flow_text(value)


@router.get("/configs/{name}")
def newest(request: Request, _: Reader, session: ReadSession, name: str) -> Response:
    return _show(request, session, service.get_config(session, name))


@router.get("/configs/{name}/{version}")
def version(request: Request, _: Reader, session: ReadSession, name: str, version: int) -> Response:
    return _show(request, session, service.get_config(session, name, version))


def _show(request: Request, session: Session, row: NamedConfig) -> Response:
    text = yaml_text(row.data)
    return page(request, "configs/show.html", ConfigContext(row, text, service.list_versions(session, row.name)))
