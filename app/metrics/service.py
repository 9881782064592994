"""Series of a run: the canonical points (newest attempt of each step), downsampled without hiding an extreme.

`run_step` counts steps over all stages: steps of the earlier stages as configured + step within the stage.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.models import Attempt, Point, Run, Series
from app.runs.progress import steps_before, steps_of_stages

POINTS_PER_BUCKET = 5
"""At most: first, last, lowest, highest, first that is not finite."""
PointRow = tuple[int, str, int, float | None, str | None, int]
"""Fields of a PointData: a long series is thinned as plain tuples, and only what is shown becomes objects."""


@dataclass(frozen=True, slots=True)
class PointData:
    run_step: int
    stage: str
    step: int
    value: float | None
    kind: str | None
    """nan, +inf or -inf where value is None."""
    attempt: int


@dataclass(frozen=True, slots=True)
class SeriesData:
    name: str
    points: list[PointData]
    total: int
    """Points there are."""
    hidden: int
    """Of them not in `points`."""
    takeovers: list[PointData]
    """Points whose attempt is another than that of the point before them."""


def _index(stage: str) -> int:
    """Example: _index("1-rl") == 1; a name that is no stage's key counts as the first stage."""
    head = stage.partition("-")[0]
    return int(head) if head.isdecimal() else 0


def list_names(session: Session, run: Run) -> list[str]:
    """Names of all metrics the run has told, sorted."""
    query = select(Series.name).distinct().join(Attempt, Attempt.id == Series.attempt_id)
    return list(session.scalars(query.where(Attempt.run_id == run.id).order_by(Series.name)))


def series(
    session: Session,
    run: Run,
    names: Sequence[str],
    *,
    max_points: int = 1000,
    after_step: int | None = None,
    attempt: int | None = None,
    stage: str | None = None,
) -> list[SeriesData]:
    """One series a name, in the order asked, unknown names empty.

    `after_step`: only points with a larger run_step. `attempt`: this attempt's own points instead of the canonical.
    `stage`: only this stage's."""
    query = select(Series.name, Series.id, Series.stage, Attempt.number).join(Attempt, Attempt.id == Series.attempt_id)
    query = query.where(Attempt.run_id == run.id, Series.name.in_(names)).order_by(Attempt.number)
    if attempt is not None:
        query = query.where(Attempt.number == attempt)
    if stage is not None:
        query = query.where(Series.stage == stage)
    sources: dict[str, list[tuple[int, str, int]]] = {name: [] for name in names}
    for name, series_id, stage_key, number in session.execute(query):
        sources[name].append((series_id, stage_key, number))
    return [_shown(name, _canonical(session, run, parts, after_step), max_points) for name, parts in sources.items()]


def _shown(name: str, points: Sequence[PointRow], max_points: int) -> SeriesData:
    places = kept_places([point[0] for point in points], [point[3] for point in points], max_points)
    takeovers = [PointData(*now) for before, now in pairwise(points) if now[5] != before[5]]
    shown = [PointData(*points[place]) for place in places]
    return SeriesData(name, shown, len(points), len(points) - len(shown), takeovers)


def _canonical(
    session: Session, run: Run, parts: Sequence[tuple[int, str, int]], after_step: int | None
) -> list[PointRow]:
    """Points of one metric in order. `parts`: (series id, stage, attempt) by attempt, so that the newest wins."""
    stages = steps_of_stages(run.config)
    newest: dict[int, dict[int, PointRow]] = {}
    for series_id, stage, number in parts:
        index = _index(stage)
        offset = steps_before(stages, index)
        rows = select(Point.step, Point.value, Point.kind).where(Point.series_id == series_id)
        if after_step is not None:
            rows = rows.where(Point.step > after_step - offset)
        found = newest.setdefault(index, {})
        for step, value, kind in session.execute(rows):
            found[step] = (offset + step, stage, step, value, kind, number)
    return [newest[index][step] for index in sorted(newest) for step in sorted(newest[index])]


def downsample(points: Sequence[PointData], max_points: int) -> list[PointData]:
    """All points if they fit; else those at `kept_places`."""
    places = kept_places([point.run_step for point in points], [point.value for point in points], max_points)
    return [points[place] for place in places]


def kept_places(steps: Sequence[int], values: Sequence[float | None], max_points: int) -> Sequence[int]:
    """Places of all points if they fit; else the first, last, lowest, highest and first non-finite of each bucket.

    `steps` never falls; `values` holds None where a value is not finite. Buckets are aligned and as wide as a power
    of two, so that points stay where they are while a chart grows."""
    if len(steps) <= max_points:
        return range(len(steps))
    width = bucket_width(steps, max_points)
    kept: list[int] = []
    start = 0
    while start < len(steps):
        end = bisect_left(steps, (steps[start] // width + 1) * width, start + 1)
        kept += [start + place for place in _extremes(values[start:end])]
        start = end
    return kept


def bucket_width(steps: Sequence[int], max_points: int) -> int:
    """The narrowest power of two with which every bucket can show all it must within `max_points`."""
    num_buckets = max(1, max_points // POINTS_PER_BUCKET)
    width = 1
    while steps[-1] // width - steps[0] // width + 1 > num_buckets:
        width *= 2
    return width


def _extremes(bucket: Sequence[float | None]) -> list[int]:
    kept = {0, len(bucket) - 1}
    finite = [value for value in bucket if value is not None]
    if finite:
        kept |= {bucket.index(min(finite)), bucket.index(max(finite))}
    if len(finite) < len(bucket):
        kept.add(bucket.index(None))
    return sorted(kept)


def latest_values(session: Session, run: Run) -> dict[str, PointData]:
    """The newest point of every metric, for indicators: last stage, then last step, then newest attempt."""
    ends = select(Point.series_id, func.max(Point.step).label("step")).group_by(Point.series_id)
    own = select(Series.id).join(Attempt, Attempt.id == Series.attempt_id).where(Attempt.run_id == run.id)
    last = ends.where(Point.series_id.in_(own)).subquery()
    query = (
        select(Series.name, Series.stage, Attempt.number, Point.step, Point.value, Point.kind)
        .join(Attempt, Attempt.id == Series.attempt_id)
        .join(last, last.c.series_id == Series.id)
        .join(Point, (Point.series_id == Series.id) & (Point.step == last.c.step))
    )
    stages = steps_of_stages(run.config)
    found: dict[str, PointData] = {}
    rows = session.execute(query)
    for name, stage, number, step, value, kind in sorted(rows, key=lambda r: (_index(r[1]), r[3], r[2])):
        found[name] = PointData(steps_before(stages, _index(stage)) + step, stage, step, value, kind, number)
    return found
