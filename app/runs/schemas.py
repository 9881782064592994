"""What the API says and takes about runs."""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_TINY: dict[str, Any] = {
    "name": "three digits",
    "model": {"source": "tiny_llama"},
    "stages": [{"kind": "rl", "data": {"source": "addition"}, "rewards": [{"kind": "accuracy"}], "num_steps": 20}],
}


class RunIn(BaseModel):
    """A config as object, as YAML text or by name; exactly one of them."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"config": _TINY, "tags": ["try"]}, {"config_name": "demo"}]}
    )

    config: dict[str, Any] | None = None
    config_yaml: str | None = Field(None, max_length=1_000_000)
    config_name: str | None = None
    config_version: int | None = None
    tags: list[str] = Field([], description="Added to the config's tags")
    reward_sources: dict[str, str] = Field({}, description="Custom reward name -> registered hash; newest without one")

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if sum(given is not None for given in (self.config, self.config_yaml, self.config_name)) != 1:
            raise ValueError("give exactly one of config (object), config_yaml (text) and config_name")
        return self


class ChangesIn(BaseModel):
    """Settings by dotted path, or a whole config."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"changes": {"name": "slower", "stages.1.optimizer.learning_rate": 1e-5}}]},
    )

    changes: dict[str, Any] = {}
    config: dict[str, Any] | None = None
    config_yaml: str | None = Field(None, max_length=1_000_000)


class EarlyStoppingIn(BaseModel):
    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"mode": "observe"}]})

    mode: Literal["off", "observe", "stop"] | None = Field(description="null returns to the config")


class RunOut(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    id: uuid.UUID
    number: int
    name: str
    tags: list[str]
    state: str
    reason: str | None
    message: str | None
    config_hash: str
    git_commit: str | None
    priority: int
    needs: dict[str, Any]
    restarts: int
    max_restarts: int
    num_attempts: int
    parent_run_id: uuid.UUID | None
    parent_checkpoint_id: uuid.UUID | None
    imported: bool
    early_stopping_override: str | None
    version: int
    stage: str | None
    step: int
    stage_steps: int
    steps_done: int
    total_steps: int
    last_reward: float | None
    sparkline: list[float | None]
    created_at: datetime
    queued_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None
    last_step_at: datetime | None


class RunDetailOut(RunOut):
    config: dict[str, Any]
    reward_sources: dict[str, str]
    early_stopping: dict[str, Any] | None = Field(description="Newest state of the rule; null before the first")


class RunsOut(BaseModel):
    items: list[RunOut]
    next_cursor: str | None


class AttemptOut(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    id: uuid.UUID
    number: int
    state: str
    reason: str | None
    message: str | None
    traceback: str | None
    worker_id: uuid.UUID | None
    worker_name: str | None = None
    devices: list[str]
    resumed_from_id: uuid.UUID | None
    first_step: int
    repeated_steps: int = Field(description="Steps of earlier attempts that it trained again")
    beats: int
    last_beat_at: datetime | None
    last_event_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None


class AttemptsOut(BaseModel):
    items: list[AttemptOut]


class TransitionOut(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    attempt_number: int | None
    source: str | None
    target: str
    reason: str | None
    message: str | None
    actor: str
    at: datetime


class TransitionsOut(BaseModel):
    items: list[TransitionOut]


class EvaluationOut(BaseModel):
    attempt: int
    stage: str
    step: int
    benchmark: str
    num_prompts: int
    metrics: dict[str, float]


class EvaluationsOut(BaseModel):
    items: list[EvaluationOut]


class SelfTestOut(BaseModel):
    attempt: int
    stage: str
    name: str
    passed: bool
    detail: str
    at: datetime


class SelfTestsOut(BaseModel):
    items: list[SelfTestOut]


class LogOut(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    attempt: int
    text: str
    start: int
    end: int = Field(description="Give it as `after` for what comes next")
    size: int


class LogHitOut(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    line_number: int
    before: list[str]
    line: str
    after: list[str]


class LogHitsOut(BaseModel):
    attempt: int
    items: list[LogHitOut]
