"""What the API says and takes about configs."""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ConfigBody(BaseModel):
    """A RunConfig as JSON object or as YAML text; exactly one of the two."""

    model_config = ConfigDict(extra="forbid")

    config: dict[str, Any] | None = None
    config_yaml: str | None = Field(None, max_length=1_000_000)

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.config is None) == (self.config_yaml is None):
            raise ValueError("give either config (an object) or config_yaml (text)")
        return self

    def data(self) -> dict[str, Any] | str:
        return self.config if self.config is not None else self.config_yaml or ""


class ConfigIn(ConfigBody):
    name: str
    note: str = Field("", max_length=2000)


class CheckIn(ConfigBody):
    reward_sources: dict[str, str] = Field({}, description="Custom reward name -> registered hash; newest without one")


class ConfigOut(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    id: uuid.UUID
    name: str
    version: int
    hash: str
    note: str
    created_at: datetime
    data: dict[str, Any]


class SummaryOut(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    name: str
    version: int
    num_versions: int
    hash: str
    note: str
    updated_at: datetime


class SummariesOut(BaseModel):
    items: list[SummaryOut]


class VersionsOut(BaseModel):
    items: list[ConfigOut]


class PresetOut(BaseModel):
    name: str
    about: str
    yaml: str
    data: dict[str, Any]


class PresetsOut(BaseModel):
    items: list[PresetOut]


class ChangeOut(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    path: str
    before: Any
    after: Any


class DiffOut(BaseModel):
    before: str
    after: str
    changes: list[ChangeOut]
