"""Launching runs: queue one, clone a config, fork from a checkpoint."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Mapping
from typing import Any

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from app.errors import Conflict, Invalid
from app.models import Checkpoint, RewardSource, Run, Transition, User, utc_now
from app.rewards.service import sources_for
from app.sessions import announce_work
from grpo_engine.config import RunConfig
from grpo_engine.config_training import GAEAdvantage
from grpo_engine.errors import Problem

_NUMBER_LOCK = 0x636F686F
"""Advisory lock under which PostgreSQL gives out run numbers."""


def actor_name(actor: User | None) -> str:
    return actor.name if actor else "local"


def create_run(
    session: Session,
    actor: User | None,
    config: RunConfig,
    *,
    reward_hashes: Mapping[str, str] | None = None,
    config_id: uuid.UUID | None = None,
    parent_run_id: uuid.UUID | None = None,
    parent_checkpoint_id: uuid.UUID | None = None,
) -> Run:
    """Queue a run of this config; workers are told after the commit.

    Raises Invalid when a custom reward is not registered."""
    sources = sources_for(session, config, reward_hashes)
    run = new_run(session, config, sources, owner=actor)
    run.config_id = config_id
    run.parent_run_id = parent_run_id
    run.parent_checkpoint_id = parent_checkpoint_id
    run.state = "queued"
    run.queued_at = utc_now()
    session.flush()
    record_start(session, run, actor_name(actor), "queued by its owner")
    announce_work(session)
    return run


def new_run(session: Session, config: RunConfig, sources: Mapping[str, RewardSource], *, owner: User | None) -> Run:
    """A row with the config frozen into it, not yet in any state."""
    run = Run(
        number=_next_number(session),
        name=config.name,
        tags=list(config.tags),
        config=config.model_dump(mode="json"),
        config_hash=config.hash(),
        reward_sources={name: source.hash for name, source in sources.items()},
        owner_id=owner.id if owner else None,
        priority=config.priority,
        needs=config.needs.model_dump(mode="json"),
        max_restarts=config.max_restarts,
        stage=config.stage_key(0),
        stage_steps=config.stages[0].num_steps,
        total_steps=config.total_steps(),
        sparkline=[],
        version=1,
    )
    session.add(run)
    return run


def record_start(session: Session, run: Run, actor: str, message: str) -> None:
    """The transition that a run begins with."""
    session.add(Transition(run_id=run.id, source=None, target=run.state, actor=actor, message=message, at=utc_now()))
    session.flush()


def _next_number(session: Session) -> int:
    if session.get_bind().dialect.name == "postgresql":
        session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _NUMBER_LOCK})
    return (session.scalar(select(func.max(Run.number))) or 0) + 1


def clone_config(run: Run) -> dict[str, Any]:
    """The run's resolved config, to be edited and launched again."""
    return copy.deepcopy(run.config)


def fork_from_checkpoint(session: Session, actor: User | None, checkpoint: Checkpoint, config: RunConfig) -> Run:
    """Queue a run that goes on from a checkpoint of another with changed settings.

    Raises Conflict when the checkpoint cannot be used, Invalid when the config does not fit it."""
    if checkpoint.state in ("damaged", "removed"):
        raise Conflict(f"The checkpoint of step {checkpoint.step} is {checkpoint.state}; choose another.")
    origin = session.get_one(Run, checkpoint.run_id)
    problems = fork_problems(RunConfig.model_validate(origin.config), config, checkpoint)
    if problems:
        raise Invalid.of(problems)
    return create_run(
        session,
        actor,
        config,
        reward_hashes=origin.reward_sources,
        parent_run_id=origin.id,
        parent_checkpoint_id=checkpoint.id,
    )


def fork_problems(origin: RunConfig, config: RunConfig, checkpoint: Checkpoint) -> list[Problem]:
    """Why a config cannot go on from a checkpoint: another model, adapter or critic, other stages before it, or no step
    left to do."""
    index, step = checkpoint.stage_index, checkpoint.step
    if config.model != origin.model:
        remedy = f"keep the model of run {origin.name!r}, whose weights the checkpoint holds"
        return [Problem("model", config.model.source, "is not the checkpoint's model", remedy)]
    if config.adapter != origin.adapter:
        remedy = f"keep the adapter of run {origin.name!r}, or merge the checkpoint and start from that model"
        return [Problem("adapter", config.adapter.kind, "is not the checkpoint's adapter", remedy)]
    kinds = [stage.kind for stage in config.stages[: index + 1]]
    expected = [stage.kind for stage in origin.stages[: index + 1]]
    if kinds != expected:
        remedy = f"begin with the stages {', '.join(expected)}; the checkpoint lies in the last of them"
        return [Problem("stages", ", ".join(kinds), "do not lead to the checkpoint", remedy)]
    if (critic := _critic(config, index)) not in (None, _critic(origin, index)):
        remedy = "keep the advantage of its stage, or use one without a critic"
        message = f"needs a {critic} critic, which the checkpoint does not hold"
        return [Problem(f"stages.{index}.advantage.kind", "gae", message, remedy)]
    steps = config.stages[index].num_steps
    if steps < step or (steps == step and index + 1 == len(config.stages)):
        remedy = f"raise it above {step}, or add a stage"
        return [Problem(f"stages.{index}.num_steps", str(steps), f"leaves nothing to do after step {step}", remedy)]
    return []


def _critic(config: RunConfig, index: int) -> str | None:
    """Backbone of the critic that a stage trains."""
    advantage = getattr(config.stages[index], "advantage", None)
    return advantage.value.backbone if isinstance(advantage, GAEAdvantage) else None
