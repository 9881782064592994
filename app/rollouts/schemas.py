"""What the API says about rollouts: the service's records, as they are."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from app.rollouts.searching import Hit
from app.rollouts.service import BatchView, GroupSummary
from app.rollouts.tokens import TokenDetail


class BatchesOut(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    items: list[BatchView]
    next_cursor: str | None


class GroupsOut(BaseModel):
    items: list[GroupSummary]


class TokensOut(BaseModel):
    items: list[TokenDetail]


class SearchOut(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    items: list[Hit]
    next_cursor: str | None
    num_batches: int
    num_missing: int
