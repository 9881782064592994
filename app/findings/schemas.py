"""What the API says about findings."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel


class FindingOut(BaseModel):
    id: int
    run_number: int
    attempt: int
    stage: str | None
    step: int
    detector: str
    severity: str
    onset_step: int
    title: str
    evidence: str
    remedy: str
    state: str
    at: datetime


class FindingsOut(BaseModel):
    items: list[FindingOut]
    next_cursor: str | None
