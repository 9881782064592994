"""REST: metric names, series, latest values."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from app.idempotency import ApiRoute
from app.metrics import service
from app.metrics.schemas import LatestOut, NamesOut, SeriesListOut, SeriesOut
from app.paging import WholeNumber
from app.runs.api import RunRef
from app.runs.service import get_run
from app.security import Reader
from app.sessions import ReadSession

router = APIRouter(prefix="/runs/{run}", tags=["metrics"], route_class=ApiRoute)
MAX_NAMES = 100


@router.get("/metrics", response_model=NamesOut)
def list_names(_: Reader, run: RunRef, session: ReadSession) -> dict[str, Any]:
    """Names of the metrics that the run has told."""
    return {"items": service.list_names(session, get_run(session, run))}


@router.get("/metrics/latest", response_model=LatestOut)
def latest_values(_: Reader, run: RunRef, session: ReadSession) -> dict[str, Any]:
    """The newest point of every metric."""
    return {"items": service.latest_values(session, get_run(session, run))}


@router.get("/series")
def get_series(
    _: Reader,
    run: RunRef,
    session: ReadSession,
    names: Annotated[list[str], Query(min_length=1, max_length=MAX_NAMES, examples=[["reward/mean", "loss"]])],
    max_points: Annotated[int, Query(ge=10, le=1_000_000)] = 1000,
    after_step: Annotated[WholeNumber | None, Query(description="Only points with a larger run_step")] = None,
    attempt: Annotated[WholeNumber | None, Query(description="Only this attempt's points")] = None,
) -> SeriesListOut:
    """Series for charts: the newest attempt of each step, downsampled deterministically without hiding an extreme."""
    found = service.series(
        session, get_run(session, run), names, max_points=max_points, after_step=after_step, attempt=attempt
    )
    return SeriesListOut(items=[_columns(entry) for entry in found])


def _columns(entry: service.SeriesData) -> SeriesOut:
    names = ("run_step", "stage", "step", "value", "kind", "attempt")
    columns = {name: [getattr(point, name) for point in entry.points] for name in names}
    return SeriesOut(name=entry.name, total=entry.total, hidden=entry.hidden, **columns)
