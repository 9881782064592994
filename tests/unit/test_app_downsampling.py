from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from app.metrics.service import PointData, bucket_width, downsample

numbers = st.one_of(st.floats(-1e6, 1e6), st.none())


def points_of(values: list[float | None], first: int = 1) -> list[PointData]:
    return [
        PointData(first + i, "0-rl", first + i, value, None if value is not None else "nan", 1)
        for i, value in enumerate(values)
    ]


@st.composite
def walks(draw: st.DrawFn) -> list[float | None]:
    """Long enough to be thinned: distinct values in any order, some not numbers."""
    size = draw(st.integers(1, 400))
    random = Random(draw(st.integers(0, 2**32)))
    values: list[float | None] = [float(value) for value in random.sample(range(-1000, 1000), size)]
    return [None if random.random() < 0.05 else value for value in values]


@settings(max_examples=40)
@given(st.one_of(walks(), st.lists(numbers, max_size=100)), st.integers(10, 60))
def test_what_is_shown_is_part_of_what_there_is_and_fits(values: list[float | None], limit: int) -> None:
    points = points_of(values)
    shown = downsample(points, limit)
    assert len(shown) <= limit
    assert [point for point in points if point in set(shown)] == shown
    assert downsample(points, limit) == shown


@settings(max_examples=40)
@given(walks(), st.integers(10, 60), st.integers(0, 1000))
def test_first_last_lowest_highest_survive(values: list[float | None], limit: int, first: int) -> None:
    points = points_of(values, first)
    shown = downsample(points, limit)
    assert shown[0] == points[0]
    assert shown[-1] == points[-1]
    finite = [value for value in values if value is not None]
    kept = [point.value for point in shown if point.value is not None]
    if finite:
        assert (min(kept), max(kept)) == (min(finite), max(finite))
    assert (None in [point.value for point in shown]) == (None in values)


@settings(max_examples=40)
@given(walks(), st.integers(10, 60), st.integers(0, 1000))
def test_each_bucket_shows_what_a_plain_loop_picks(values: list[float | None], limit: int, first: int) -> None:
    points = points_of(values, first)
    width = bucket_width([point.run_step for point in points], limit)
    wanted: set[PointData] = set()
    for start in {point.run_step // width for point in points}:
        bucket = [point for point in points if point.run_step // width == start]
        finite = [point for point in bucket if point.value is not None]
        others = [point for point in bucket if point.value is None]
        wanted |= {bucket[0], bucket[-1], *others[:1]}
        if finite:
            wanted |= {min(finite, key=lambda p: p.value or 0.0), max(finite, key=lambda p: p.value or 0.0)}
    shown = points if len(points) <= limit else sorted(wanted, key=lambda point: point.run_step)
    assert downsample(points, limit) == shown


@settings(max_examples=40)
@given(st.lists(st.floats(-5, 5), min_size=40, max_size=200), st.integers(10, 30))
def test_points_stay_where_they_are_while_a_chart_grows(values: list[float], limit: int) -> None:
    points = points_of(list(values))
    before, after = points[:-1], points
    steps = [point.run_step for point in after]
    width = bucket_width(steps, limit)
    if bucket_width(steps[:-1], limit) == width:
        settled = after[-1].run_step // width * width
        shown = [point for point in downsample(before, limit) if point.run_step < settled]
        assert shown == [point for point in downsample(after, limit) if point.run_step < settled]


def test_few_points_are_all_shown() -> None:
    points = points_of([1.0, None, 3.0])
    assert downsample(points, 10) == points
    assert downsample([], 10) == []


def test_a_spike_between_two_of_a_hundred_thousand_points_is_seen() -> None:
    values: list[float | None] = [0.0] * 100_000
    values[77_777] = 9.0
    shown = downsample(points_of(values), 500)
    assert max(point.value or 0 for point in shown) == 9.0
    assert len(shown) > 100
