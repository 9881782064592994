"""Series of a run: the canonical points (newest attempt of each step), downsampled without hiding an extreme.

`run_step` counts steps over all stages: steps of the earlier stages as configured + step within the stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.models import Attempt, Point, Run, Series
from app.runs.progress import steps_before, steps_of_stages

POINTS_PER_BUCKET = 5
"""At most: first, last, lowest, highest, first that is not finite."""


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
) -> list[SeriesData]:
    """One series a name, in the order asked, unknown names empty.

    `after_step`: only points with a larger run_step. `attempt`: this attempt's own points instead of the canonical."""
    found: list[SeriesData] = []
    for name in dict.fromkeys(names):
        points = _canonical(session, run, name, attempt)
        if after_step is not None:
            points = [point for point in points if point.run_step > after_step]
        shown = downsample(points, max_points)
        found.append(SeriesData(name, shown, len(points), len(points) - len(shown)))
    return found


def _canonical(session: Session, run: Run, name: str, attempt: int | None) -> list[PointData]:
    query = select(Series.id, Series.stage, Attempt.number).join(Attempt, Attempt.id == Series.attempt_id)
    query = query.where(Attempt.run_id == run.id, Series.name == name).order_by(Attempt.number)
    if attempt is not None:
        query = query.where(Attempt.number == attempt)
    stages = steps_of_stages(run.config)
    newest: dict[tuple[int, int], PointData] = {}
    for series_id, stage, number in session.execute(query):
        index = _index(stage)
        offset = steps_before(stages, index)
        rows = select(Point.step, Point.value, Point.kind).where(Point.series_id == series_id)
        for step, value, kind in session.execute(rows):
            newest[index, step] = PointData(offset + step, stage, step, value, kind, number)
    return [newest[key] for key in sorted(newest)]


def downsample(points: Sequence[PointData], max_points: int) -> list[PointData]:
    """All points if they fit; else the first, last, lowest, highest and first non-finite of each bucket.

    Buckets are aligned and as wide as a power of two, so that points stay where they are while a chart grows."""
    if len(points) <= max_points:
        return list(points)
    buckets = _buckets(points, bucket_width(points, max_points))
    return [point for bucket in buckets for point in _extremes(bucket)]


def bucket_width(points: Sequence[PointData], max_points: int) -> int:
    """The narrowest power of two with which every bucket can show all it must within `max_points`."""
    num_buckets = max(1, max_points // POINTS_PER_BUCKET)
    width = 1
    while points[-1].run_step // width - points[0].run_step // width + 1 > num_buckets:
        width *= 2
    return width


def _buckets(points: Sequence[PointData], width: int) -> Iterator[list[PointData]]:
    bucket: list[PointData] = []
    for point in points:
        if bucket and point.run_step // width != bucket[0].run_step // width:
            yield bucket
            bucket = []
        bucket.append(point)
    yield bucket


def _extremes(bucket: Sequence[PointData]) -> list[PointData]:
    kept = {0, len(bucket) - 1}
    finite = [(point.value, index) for index, point in enumerate(bucket) if point.value is not None]
    if finite:
        kept.add(min(finite)[1])
        kept.add(max(finite, key=lambda entry: (entry[0], -entry[1]))[1])
    kept.update([index for index, point in enumerate(bucket) if point.value is None][:1])
    return [bucket[index] for index in sorted(kept)]


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


def history(session: Session, run: Run, name: str, count: int) -> list[PointData]:
    """The last `count` canonical points of one metric."""
    return _canonical(session, run, name, None)[-count:] if count > 0 else []
