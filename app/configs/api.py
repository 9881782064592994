"""REST: named configs, presets, comparison, schema, check."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Query

from app.configs import checking, service
from app.configs.schemas import (
    ChangeOut,
    CheckIn,
    ConfigIn,
    ConfigOut,
    DiffOut,
    PresetOut,
    PresetsOut,
    SummariesOut,
    VersionsOut,
)
from app.idempotency import ApiRoute
from app.models import NamedConfig
from app.rewards.service import sources_for
from app.security import Reader, Runner, allowed
from app.sessions import AppDatabase, AppSettings, ReadSession, WriteSession

router = APIRouter(tags=["configs"], route_class=ApiRoute)


@router.get("/schema/run-config")
def run_config_schema(_: Reader) -> dict[str, Any]:
    """JSON schema of a run's config; descriptions are the help texts of form and docs."""
    return service.run_config_schema()


@router.get("/presets", response_model=PresetsOut)
def list_presets(_: Reader) -> dict[str, Any]:
    return {"items": [_preset_out(preset) for preset in service.presets()]}


@router.get("/presets/{name}")
def get_preset(_: Reader, name: str) -> PresetOut:
    return _preset_out(service.get_preset(name))


def _preset_out(preset: service.Preset) -> PresetOut:
    data = preset.config.model_dump(mode="json")
    return PresetOut(name=preset.name, about=preset.about, yaml=preset.yaml, data=data)


@router.get("/configs", response_model=SummariesOut)
def list_configs(_: Reader, session: ReadSession) -> dict[str, Any]:
    """Named configs with their newest version."""
    return {"items": service.list_configs(session)}


@router.post("/configs", status_code=201, response_model=ConfigOut)
def save_config(user: Runner, body: ConfigIn, session: WriteSession) -> NamedConfig:
    """Save a new version of a named config; saving what is saved already answers with the newest version."""
    return service.save_config(session, user, body.name, body.data(), body.note)


@router.get("/configs/diff")
def diff_configs(
    _: Reader,
    session: ReadSession,
    before: str = Query(examples=["addition@1"]),
    after: str = Query(examples=["addition"]),
) -> DiffOut:
    """Compare two configs, each `name@version`, `name` (newest), `preset:name` or `run:number`."""
    changes = service.diff(service.referenced(session, before), service.referenced(session, after))
    return DiffOut(before=before, after=after, changes=[ChangeOut.model_validate(change) for change in changes])


@router.get("/configs/{name}", response_model=ConfigOut)
def get_config(_: Reader, name: str, session: ReadSession) -> NamedConfig:
    """The newest version."""
    return service.get_config(session, name)


@router.get("/configs/{name}/versions", response_model=VersionsOut)
def list_versions(_: Reader, name: str, session: ReadSession) -> dict[str, Any]:
    return {"items": service.list_versions(session, name)}


@router.get("/configs/{name}/versions/{version}", response_model=ConfigOut)
def get_version(_: Reader, name: str, version: int, session: ReadSession) -> NamedConfig:
    return service.get_config(session, name, version)


@router.post("/configs/check")
def check_config(user: Runner, body: CheckIn, database: AppDatabase, settings: AppSettings) -> dict[str, Any]:
    """Preflight: read the data, render three prompts, call the rewards on gold answers, estimate memory.

    Runs in a child process with a time limit. Custom rewards are called only for users with the `code` permission."""
    config = service.parse(body.data())
    with database.read() as session:
        sources = sources_for(session, config, body.reward_sources)
    called = {name: row.source for name, row in sources.items()} if allowed(user, "code") else {}
    return checking.check(settings, config, called)
