"""REST: launch, find, steer, clone and delete runs."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query

from app.configs import service as configs
from app.configs.edits import apply_changes
from app.idempotency import ApiRoute
from app.models import Run
from app.runs import service
from app.runs.schemas import (
    AttemptOut,
    AttemptsOut,
    ChangesIn,
    EarlyStoppingIn,
    EvaluationOut,
    EvaluationsOut,
    RunDetailOut,
    RunIn,
    RunOut,
    RunsOut,
    SelfTestOut,
    SelfTestsOut,
    TransitionsOut,
)
from app.runs.self_tests import list_self_tests
from app.security import Reader, Runner
from app.sessions import AppDatabase, AppStore, ReadSession, WriteSession
from grpo_engine.config import RunConfig

router = APIRouter(prefix="/runs", tags=["runs"], route_class=ApiRoute)
RunRef = Annotated[str, Path(description="Number or id of the run", examples=["12"])]


@router.get("", response_model=RunsOut)
def list_runs(
    _: Reader,
    session: ReadSession,
    state: Annotated[list[str] | None, Query(description="Several may be given")] = None,
    tag: str | None = None,
    text: Annotated[str | None, Query(description="In name or tags")] = None,
    sort: Annotated[str, Query(description="number, name, state, last_reward …; - for down")] = "-number",
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: str | None = None,
) -> dict[str, Any]:
    """One page of runs; walk on with `next_cursor`."""
    filters = service.RunFilters(tuple(state or ()), tag, text)
    page = service.list_runs(session, filters, sort=sort, limit=limit, cursor=cursor)
    return {"items": page.items, "next_cursor": page.next_cursor}


@router.post("", status_code=201, response_model=RunOut)
def start_run(user: Runner, body: RunIn, session: WriteSession) -> Run:
    """Queue a run of a config. Custom rewards are named and must be registered."""
    config_id = None
    data: dict[str, Any] | str | None = body.config if body.config is not None else body.config_yaml
    if data is None:
        named = configs.get_config(session, body.config_name or "", body.config_version)
        config_id, data = named.id, named.data
    config = _with_tags(configs.parse(data), body.tags)
    return service.create_run(session, user, config, reward_hashes=body.reward_sources, config_id=config_id)


def _with_tags(config: RunConfig, tags: list[str]) -> RunConfig:
    if not tags:
        return config
    return configs.parse({**config.model_dump(mode="json"), "tags": list(dict.fromkeys([*config.tags, *tags]))})


@router.get("/{run}")
def get_run(_: Reader, run: RunRef, session: ReadSession) -> RunDetailOut:
    row = service.get_run(session, run)
    fields = RunOut.model_validate(row).model_dump()
    fields["git_commit"] = service.git_commit(session, row)
    return RunDetailOut(
        **fields,
        config=row.config,
        reward_sources=row.reward_sources,
        early_stopping=service.early_stopping_state(session, row),
    )


@router.delete("/{run}", status_code=204)
def delete_run(_: Runner, run: RunRef, database: AppDatabase, store: AppStore) -> None:
    """Remove an ended run with everything it wrote. 409 while it has not ended."""
    with database.read() as session:
        row = service.get_run(session, run)
        service.check_deletable(session, row)
    service.remove_files(store, row)
    with database.write() as session:
        service.delete_run(session, row)


@router.post("/{run}/cancel", status_code=202, response_model=RunOut)
def cancel_run(user: Runner, run: RunRef, session: WriteSession) -> Run:
    """Cancel; accepted means recorded. `cancelled` follows when no process of the run is left."""
    return service.cancel(session, service.get_run(session, run), user)


@router.post("/{run}/pause", status_code=202, response_model=RunOut)
def pause_run(user: Runner, run: RunRef, session: WriteSession) -> Run:
    """Save a checkpoint and free the device."""
    return service.pause(session, service.get_run(session, run), user)


@router.post("/{run}/resume", status_code=202, response_model=RunOut)
def resume_run(user: Runner, run: RunRef, session: WriteSession) -> Run:
    """Queue a paused run again; any worker goes on from its last checkpoint."""
    return service.resume(session, service.get_run(session, run), user)


@router.post("/{run}/clone", status_code=201, response_model=RunOut)
def clone_run(user: Runner, run: RunRef, body: ChangesIn, session: WriteSession) -> Run:
    """Queue a new run with this one's config and the given changes, from the beginning."""
    origin = service.get_run(session, run)
    config = changed_config(origin, body)
    return service.create_run(session, user, config, reward_hashes=origin.reward_sources, parent_run_id=origin.id)


def changed_config(origin: Run, body: ChangesIn) -> RunConfig:
    """The config that a clone or fork asks for."""
    if body.config_yaml is not None:
        return configs.parse(body.config_yaml)
    data = body.config if body.config is not None else service.clone_config(origin)
    return configs.parse(apply_changes(data, body.changes))


@router.put("/{run}/early-stopping", response_model=RunOut)
def set_early_stopping(user: Runner, run: RunRef, body: EarlyStoppingIn, session: WriteSession) -> Run:
    """Override early stopping while the run goes on."""
    return service.set_early_stopping(session, service.get_run(session, run), user, body.mode)


@router.get("/{run}/attempts", response_model=AttemptsOut)
def list_attempts(_: Reader, run: RunRef, session: ReadSession) -> dict[str, Any]:
    """Tries of the run, newest first, with the steps each trained again."""
    views = service.list_attempts(session, service.get_run(session, run))
    return {"items": [_attempt_out(view) for view in views]}


def _attempt_out(view: service.AttemptView) -> AttemptOut:
    return AttemptOut.model_validate(view.attempt).model_copy(update={"worker_name": view.worker_name})


@router.get("/{run}/transitions", response_model=TransitionsOut)
def list_transitions(_: Reader, run: RunRef, session: ReadSession) -> dict[str, Any]:
    """Every change of state: who, when, why."""
    return {"items": service.list_transitions(session, service.get_run(session, run))}


@router.get("/{run}/evaluations", response_model=EvaluationsOut)
def list_evaluations(_: Reader, run: RunRef, session: ReadSession) -> dict[str, Any]:
    rows = service.list_evaluations(session, service.get_run(session, run))
    fields = ("stage", "step", "benchmark", "num_prompts", "metrics")
    return {"items": [EvaluationOut(attempt=n, **{name: getattr(row, name) for name in fields}) for row, n in rows]}


@router.get("/{run}/self-tests", response_model=SelfTestsOut)
def list_run_self_tests(_: Reader, run: RunRef, session: ReadSession) -> dict[str, Any]:
    """What the engine checked before each stage of training, in the order of training."""
    fields = ("stage", "name", "passed", "detail", "at")
    views = list_self_tests(session, service.get_run(session, run))
    return {"items": [SelfTestOut(attempt=v.attempt, **{name: getattr(v.row, name) for name in fields}) for v in views]}
