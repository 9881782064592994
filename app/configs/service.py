"""Named, versioned configs; presets; comparison; the schema that forms are made from. Checks: app.configs.checking."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.errors import BadRequest, Invalid, NotFound
from app.models import NamedConfig, User
from app.runs.service import get_run
from grpo_engine.config import RunConfig
from grpo_engine.config_errors import load_config
from grpo_engine.errors import InvalidConfig, Problem

PRESETS = Path(__file__).resolve().parents[2] / "configs"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,199}", re.ASCII)
MISSING = "—"
"""Stands for a value that one of two compared configs does not have."""


@dataclass(frozen=True, slots=True)
class ConfigSummary:
    name: str
    version: int
    """The newest."""
    num_versions: int
    hash: str
    note: str
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class Preset:
    """A config that ships with Cohort, as written in `configs/<name>.yaml`."""

    name: str
    about: str
    """The comment at the head of the file."""
    yaml: str
    config: RunConfig


@dataclass(frozen=True, slots=True)
class Change:
    """One leaf that differs; a value that is not there is `MISSING`."""

    path: str
    before: Any
    after: Any


def parse(data: Mapping[str, Any] | str, source: str = "config") -> RunConfig:
    """The config in a mapping or YAML text. Raises Invalid naming every field that is wrong."""
    try:
        return load_config(data if isinstance(data, str) else dict(data), source=source)
    except InvalidConfig as error:
        raise Invalid.of(error.problems) from error


def run_config_schema() -> dict[str, Any]:
    """JSON schema of RunConfig; the descriptions are the help texts."""
    return RunConfig.model_json_schema()


# ---------------------------------------------------------------- presets
def presets() -> list[Preset]:
    return [_preset(path) for path in sorted(PRESETS.glob("*.yaml"))]


def get_preset(name: str) -> Preset:
    found = {path.stem: path for path in PRESETS.glob("*.yaml")}
    if name not in found:
        raise NotFound(f"There is no preset {name!r}; there are {', '.join(sorted(found))}.")
    return _preset(found[name])


def _preset(path: Path) -> Preset:
    text = path.read_text()
    head = [line.lstrip("# ") for line in text.split("\n\n")[0].splitlines() if line.startswith("#")]
    return Preset(path.stem, " ".join(head), text, load_config(text, source=path.name))


# ---------------------------------------------------------------- named configs
def list_configs(session: Session) -> list[ConfigSummary]:
    """The newest version of each name."""
    newest = select(NamedConfig.name, func.max(NamedConfig.version).label("version"), func.count().label("count"))
    latest = newest.group_by(NamedConfig.name).subquery()
    same = (NamedConfig.name == latest.c.name) & (NamedConfig.version == latest.c.version)
    rows = session.execute(select(NamedConfig, latest.c.count).join(latest, same).order_by(NamedConfig.name))
    return [ConfigSummary(row.name, row.version, count, row.hash, row.note, row.created_at) for row, count in rows]


def list_versions(session: Session, name: str) -> list[NamedConfig]:
    """Newest first. Raises NotFound."""
    rows = session.scalars(select(NamedConfig).where(NamedConfig.name == name).order_by(NamedConfig.version.desc()))
    found = list(rows)
    if not found:
        raise NotFound(f"There is no config named {name!r}.")
    return found


def get_config(session: Session, name: str, version: int | None = None) -> NamedConfig:
    """This version, the newest without one. Raises NotFound."""
    versions = list_versions(session, name)
    for row in versions:
        if version in (None, row.version):
            return row
    raise NotFound(f"Config {name!r} has no version {version}; the newest is {versions[0].version}.")


def referenced(session: Session, reference: str) -> dict[str, Any]:
    """Data of the config that `name@version`, `name` (its newest), `preset:name` or `run:number` names.

    Raises NotFound, BadRequest for a version that is no number."""
    kind, _, rest = reference.partition(":")
    if kind == "preset":
        return get_preset(rest).config.model_dump(mode="json")
    if kind == "run":
        return get_run(session, rest).config
    name, _, version = reference.partition("@")
    if version and not version.isdecimal():
        raise BadRequest(f"{reference!r}: the version after @ is a number, such as {name}@2.")
    return get_config(session, name, int(version) if version else None).data


def save_config(
    session: Session, actor: User | None, name: str, data: Mapping[str, Any] | str, note: str = ""
) -> NamedConfig:
    """A new version of a named config; the newest one itself when nothing changed. Raises Invalid."""
    if not NAME.fullmatch(name):
        problem = Problem("name", name[:200], "is not a config name", "use letters, digits, space, dot, - and _")
        raise Invalid.of([problem])
    config = parse(data)
    newest = session.scalar(
        select(NamedConfig).where(NamedConfig.name == name).order_by(NamedConfig.version.desc()).limit(1)
    )
    if newest is not None and newest.hash == config.hash():
        return newest
    row = NamedConfig(
        name=name,
        version=newest.version + 1 if newest else 1,
        data=config.model_dump(mode="json"),
        hash=config.hash(),
        note=note,
        owner_id=actor.id if actor else None,
    )
    session.add(row)
    session.flush()
    return row


# ---------------------------------------------------------------- comparison
def diff(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Leaves that differ, in the order of their paths.

    Example: diff({"a": {"b": 1}}, {"a": {"b": 2}}) == [Change("a.b", 1, 2)]"""
    left, right = dict(_leaves(before)), dict(_leaves(after))
    paths = [*left, *(path for path in right if path not in left)]
    values = [Change(path, left.get(path, MISSING), right.get(path, MISSING)) for path in paths]
    return [change for change in values if repr(change.before) != repr(change.after)]


def _leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list) and value and any(isinstance(item, Mapping) for item in value):
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        return [(path, value)]
    return [leaf for key, item in items for leaf in _leaves(item, f"{path}.{key}" if path else key)]
