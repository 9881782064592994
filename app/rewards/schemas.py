"""What the API says and takes about registered rewards."""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_EXAMPLE = """def reward(completions, answer, **columns):
    return [float(text.strip() == gold) for text, gold in zip(completions, answer)]
"""


class RewardIn(BaseModel):
    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"name": "exact", "source": _EXAMPLE}]})

    name: str
    source: str


class RewardSummaryOut(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    id: uuid.UUID
    name: str
    hash: str
    created_at: datetime


class RewardOut(RewardSummaryOut):
    source: str


class RewardsOut(BaseModel):
    items: list[RewardSummaryOut]


# ---------------------------------------------------------------- replays
class ReplayIn(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"config": {"rewards": [{"kind": "accuracy"}, {"kind": "step_validity"}]}}]},
    )

    config: dict[str, Any] | None = Field(None, description="A run config, or rewards with reward_clip and data")
    config_yaml: str | None = Field(None, description="The same as YAML")
    stage: str | None = Field(None, description="Stage whose rollouts are meant; the only one by default")

    @model_validator(mode="after")
    def _one_config(self) -> Self:
        if (self.config is None) == (self.config_yaml is None):
            raise ValueError("give either config or config_yaml")
        return self


class ReplaySummaryOut(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    id: uuid.UUID
    stage: str
    state: Literal["queued", "running", "completed", "failed"]
    message: str
    created_at: datetime
    ended_at: datetime | None


class ReplayOut(ReplaySummaryOut):
    config: dict[str, Any]
    summary: dict[str, Any] | None = Field(description="What would have changed; null until completed")


class ReplaysOut(BaseModel):
    items: list[ReplaySummaryOut]
