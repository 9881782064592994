"""What the API says and takes about registered rewards."""

from __future__ import annotations

import uuid
from datetime import datetime

from pydantic import BaseModel, ConfigDict

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
