"""What the API says about metrics."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class NamesOut(BaseModel):
    items: list[str]


class PointOut(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    run_step: int = Field(description="Step over all stages")
    stage: str
    step: int
    value: float | None
    kind: str | None = Field(description="nan, +inf or -inf where value is null")
    attempt: int


class SeriesOut(BaseModel):
    """One metric, its points as columns of equal length."""

    name: str
    total: int = Field(description="Points there are")
    hidden: int = Field(description="Of them left out; each bucket keeps first, last, lowest, highest and a non-finite")
    run_step: list[int]
    stage: list[str]
    step: list[int]
    value: list[float | None]
    kind: list[str | None] = Field(description="nan, +inf or -inf where value is null")
    attempt: list[int]


class SeriesListOut(BaseModel):
    items: list[SeriesOut]


class LatestOut(BaseModel):
    items: dict[str, PointOut]
