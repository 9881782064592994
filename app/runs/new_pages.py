"""Pages: start a run. One form made from the config's schema, the same as YAML, a check, saving under a name.

Every button posts the whole form and gets it back; nothing is kept on the server in between.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.responses import Response
from sqlalchemy.orm import Session

from app.checkpoints import service as checkpoints
from app.configs import checking
from app.configs import service as configs
from app.configs.service import ConfigSummary, Preset
from app.errors import AppError, BadRequest, Invalid
from app.form_nodes import Section
from app.forms import SchemaForm
from app.models import Checkpoint, NamedConfig, Run
from app.rewards.service import sources_for
from app.runs import service
from app.security import Reader, Runner, allowed
from app.sessions import AppDatabase, AppSettings, ReadSession, WriteSession
from app.web import page, pages_router, redirect
from app.yaml_text import yaml_text
from grpo_engine.config import RunConfig
from grpo_engine.config_errors import load_config, read_yaml
from grpo_engine.errors import InvalidConfig, Problem

router = pages_router()
TEMPLATE = "runs/new.html"


@dataclass(frozen=True)
class Draft:
    """What the browser sent: the config as data or as YAML, and where it came from."""

    data: dict[str, Any]
    yaml: str
    view: str
    """form or yaml."""
    checkpoint: str = ""
    parent: str = ""
    config_ref: str = ""
    save_name: str = ""
    note: str = ""
    source: str = ""
    """What the form was filled from, in words."""


@dataclass(frozen=True)
class NewRunContext:
    draft: Draft
    tree: Section | None
    problems: list[Problem]
    """All problems; those with a field in the form are shown there too."""
    save_error: str
    presets: list[Preset]
    configs: list[ConfigSummary]
    report: dict[str, Any] | None
    report_error: str
    total_steps: int


@lru_cache
def schema_form() -> SchemaForm:
    return SchemaForm(configs.run_config_schema())


async def posted_fields(request: Request) -> dict[str, str]:
    return {name: value for name, value in (await request.form()).items() if isinstance(value, str)}


Fields = Annotated[dict[str, str], Depends(posted_fields)]


# ---------------------------------------------------------------- open
@router.get("/runs/new")
def new_run(
    request: Request,
    _: Reader,
    session: ReadSession,
    preset: str = "",
    config: str = "",
    clone: str = "",
    checkpoint: str = "",
    view: str = "form",
) -> Response:
    draft = replace(_opened(session, preset, config, clone, checkpoint), view="yaml" if view == "yaml" else "form")
    return _show(request, session, draft)


def _opened(session: Session, preset: str, config: str, clone: str, checkpoint: str) -> Draft:
    if checkpoint:
        row = _checkpoint(session, checkpoint)
        run = session.get_one(Run, row.run_id)
        data = {**service.clone_config(run), "name": f"{run.name}, from step {row.step}"[:200]}
        words = f"checkpoint of run #{run.number}, stage {row.stage}, step {row.step}"
        return Draft(data, yaml_text(data), "form", checkpoint=str(row.id), source=words)
    if clone:
        run = service.get_run(session, clone)
        data = service.clone_config(run)
        return Draft(data, yaml_text(data), "form", parent=str(run.id), source=f"run #{run.number}")
    if config:
        named = _named(session, config)
        words = f"config {named.name}, version {named.version}"
        return Draft(
            named.data, yaml_text(named.data), "form", config_ref=f"{named.name}@{named.version}", source=words
        )
    names = [known.name for known in configs.presets()]
    chosen = configs.get_preset(preset or ("demo" if "demo" in names else names[0]))
    data = chosen.config.model_dump(mode="json")
    return Draft(data, chosen.yaml, "form", source=f"preset {chosen.name}")


def _named(session: Session, reference: str) -> NamedConfig:
    name, _, version = reference.rpartition("@")
    if not name or not version.isdecimal():
        return configs.get_config(session, reference)
    return configs.get_config(session, name, int(version))


def _checkpoint(session: Session, text: str) -> Checkpoint:
    try:
        return checkpoints.get_checkpoint(session, uuid.UUID(text))
    except ValueError as error:
        raise BadRequest(f"{text[:60]!r} is not a checkpoint's id.") from error


# ---------------------------------------------------------------- edit
@router.post("/runs/new")
def edit(request: Request, _: Runner, session: ReadSession, fields: Fields) -> Response:
    """Change the form's shape: another kind, an item more or less, or the other view. Only YAML that becomes a form is
    checked: the form has no place for a field that the schema does not know, so it is named while it is known."""
    try:
        draft = _edited(_draft(fields), fields.get("op", ""))
    except Invalid as error:
        return _show(request, session, _draft(fields), problems=error.problems, status=422)
    from_yaml = fields.get("view") == "yaml" and draft.view == "form"
    return _show(request, session, draft, problems=_faults(draft.data) if from_yaml else [])


def _faults(data: Mapping[str, Any]) -> list[Problem]:
    try:
        configs.parse(data)
    except Invalid as error:
        return error.problems
    return []


def _edited(draft: Draft, op: str) -> Draft:
    verb, _, rest = op.partition(" ")
    if verb == draft.view:
        return draft
    if verb == "yaml":
        return replace(draft, yaml=yaml_text(draft.data), view="yaml")
    if verb == "form":
        return replace(draft, data=_loaded(draft.yaml), view="form")
    path, _, kind = rest.partition(" ")
    if verb == "add":
        _list_at(draft.data, path).append(_blank(path, kind))
    elif verb in ("remove", "up"):
        path, _, index = path.rpartition(".")
        rows = _list_at(draft.data, path)
        row = rows.pop(int(index)) if index.isdecimal() and int(index) < len(rows) else None
        if verb == "up" and row is not None:
            rows.insert(max(0, int(index) - 1), row)
    return draft


def _blank(path: str, kind: str) -> dict[str, Any]:
    try:
        return schema_form().blank(path, kind)
    except KeyError as error:
        raise BadRequest(f"The config has no list at {path[:100]!r}.") from error


def _list_at(data: Any, path: str) -> list[Any]:
    """The list at a dotted path of the posted data, made when it is missing."""
    *parents, name = path.split(".")
    try:
        for part in parents:
            data = data[int(part)] if part.isdecimal() else data[part]
        rows = data.setdefault(name, [])
    except (KeyError, IndexError, TypeError, AttributeError):
        rows = None
    if not isinstance(rows, list):
        raise BadRequest(f"The form has no list at {path[:100]!r}.")
    return rows


# ---------------------------------------------------------------- check, save, launch
@router.post("/runs/new/check")
def check(
    request: Request, user: Runner, database: AppDatabase, settings: AppSettings, session: ReadSession, fields: Fields
) -> Response:
    draft = _draft(fields)
    try:
        config = _config(draft)
        with database.read() as early:  # the check takes long; no transaction stays open meanwhile
            sources = sources_for(early, config)
    except Invalid as error:
        return _show(request, session, draft, problems=error.problems, status=422)
    called = {name: row.source for name, row in sources.items()} if allowed(user, "code") else {}
    try:
        report = checking.check(settings, config, called)
    except AppError as error:
        return _show(request, session, draft, report_error=error.detail)
    problems = [Problem(**{k: str(p[k]) for k in ("field", "value", "message", "remedy")}) for p in report["problems"]]
    return _show(request, session, draft, problems=problems, report=report)


@router.post("/runs/new/save")
def save(request: Request, user: Runner, session: WriteSession, fields: Fields) -> Response:
    draft = _draft(fields)
    try:
        config = _config(draft)
    except Invalid as error:
        return _show(request, session, draft, problems=error.problems, status=422)
    try:
        row = configs.save_config(session, user, draft.save_name.strip(), config.model_dump(mode="json"), draft.note)
    except Invalid as error:
        text = "; ".join(f"{p.value or 'the name'} {p.message}, {p.remedy}" for p in error.problems)
        return _show(request, session, draft, save_error=text, status=422)
    return redirect(f"/runs/new?config={row.name}@{row.version}", f"Saved as {row.name}, version {row.version}.")


@router.post("/runs/new/launch")
def launch(request: Request, user: Runner, session: WriteSession, fields: Fields) -> Response:
    draft = _draft(fields)
    try:
        run = _launched(session, user, draft, _config(draft))
    except Invalid as error:
        return _show(request, session, draft, problems=error.problems, status=422)
    return redirect(f"/runs/{run.number}", f"Run #{run.number} is queued.")


def _launched(session: Session, user: Runner, draft: Draft, config: RunConfig) -> Run:
    if draft.checkpoint:
        return service.fork_from_checkpoint(session, user, _checkpoint(session, draft.checkpoint), config)
    parent = service.get_run(session, draft.parent) if draft.parent else None
    named = _named(session, draft.config_ref) if draft.config_ref else None
    return service.create_run(
        session,
        user,
        config,
        reward_hashes=dict(parent.reward_sources) if parent else None,
        config_id=named.id if named and named.hash == config.hash() else None,
        parent_run_id=parent.id if parent else None,
    )


# ---------------------------------------------------------------- between browser and config
def _draft(fields: Mapping[str, str]) -> Draft:
    view = "yaml" if fields.get("view") == "yaml" else "form"
    text = fields.get("yaml", "").replace("\r\n", "\n")
    data = schema_form().parse(fields) if view == "form" else {}
    kept = {
        name: fields.get(f"_{name}", "")
        for name in ("checkpoint", "parent", "config_ref", "save_name", "note", "source")
    }
    return Draft(data, text, view, **kept)


def _config(draft: Draft) -> RunConfig:
    """Raises Invalid with every problem."""
    return configs.parse(draft.data if draft.view == "form" else draft.yaml)


def _loaded(text: str) -> dict[str, Any]:
    """YAML as a mapping; the form shows which of its fields are wrong. Raises Invalid when the whole is."""
    data = None
    try:
        data = read_yaml(text)
        load_config(data)
    except InvalidConfig as error:
        whole = [problem for problem in error.problems if not problem.field]
        if whole or not isinstance(data, Mapping):
            raise Invalid.of(whole or error.problems) from error
    return dict(data)


def _show(
    request: Request,
    session: Session,
    draft: Draft,
    *,
    problems: list[Problem] | None = None,
    save_error: str = "",
    report: dict[str, Any] | None = None,
    report_error: str = "",
    status: int = 200,
) -> Response:
    errors: dict[str, str] = {}
    for problem in problems or []:
        errors.setdefault(problem.field, f"{problem.message}; {problem.remedy}" if problem.remedy else problem.message)
    listed = draft.data.get("stages")
    stages = [stage for stage in listed if isinstance(stage, Mapping)] if isinstance(listed, list) else []
    steps = [stage.get("num_steps") for stage in stages]
    context = NewRunContext(
        draft=draft,
        tree=schema_form().build(draft.data, errors) if draft.view == "form" else None,
        problems=problems or [],
        save_error=save_error,
        presets=configs.presets(),
        configs=configs.list_configs(session),
        report=report,
        report_error=report_error,
        total_steps=sum(step for step in steps if isinstance(step, int)),
    )
    block = "editor" if request.headers.get("HX-Request") == "true" else None
    return page(request, TEMPLATE, context, block=block, status=status)
