"""Plain values as they go between a program and its tests."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_engine.reward.sandbox.inside.literals import MAX_DEPTH, MAX_ITEMS, decode, encode


def other(value: Any) -> Any:
    return ["h", type(value).__name__]


def through(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value, other))), lambda data: data)


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.complex_numbers(allow_nan=False), st.text(),
    st.binary(), st.decimals(allow_nan=False), st.fractions(), st.dates(), st.datetimes(), st.times(), st.timedeltas(),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(SCALARS, inner, max_size=3)
        | st.sets(SCALARS, max_size=3)
        | st.frozensets(SCALARS, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=50)
@given(VALUES)
def test_a_plain_value_comes_out_equal_and_of_the_same_type(value: Any) -> None:
    back = through(value)
    assert back == value
    assert type(back) is type(value)


class Colour(enum.IntEnum):
    RED = 3


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Point(1, 2), (1, 2)),
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        (collections.OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (Colour.RED, 3),
        (collections.deque([1, 2]), [1, 2]),
        ({"a": 1}.keys(), ["a"]),
        (range(2, 9, 3), range(2, 9, 3)),
        (bytearray(b"x"), bytearray(b"x")),
        ("\ud800 lone", "\ud800 lone"),
        (10**5000, 10**5000),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_below_a_plain_type_is_reduced_to_it(value: Any, expected: Any) -> None:
    back = through(value)
    assert (back, type(back), list(back) if isinstance(back, dict) else None) == (
        expected, type(expected), list(expected) if isinstance(expected, dict) else None,
    )  # fmt: skip


def test_numbers_that_are_not_finite_survive() -> None:
    assert math.isnan(through(math.nan))
    assert through([math.inf, -math.inf]) == [math.inf, -math.inf]
    assert repr(through(-0.0)) == "-0.0"


def test_an_iterator_is_drawn_to_a_limit_and_comes_out_as_one() -> None:
    assert len(list(through(iter(int, 1)))) == MAX_ITEMS
    assert next(through(x for x in "ab")) == "a"


def test_what_is_no_plain_value_is_left_to_the_writer() -> None:
    assert through([object(), 1]) == [["h", "object"], 1]
    assert through(print) == ["h", "builtin_function_or_method"]


def test_a_value_without_end_is_refused() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(ValueError, match=f"more than {MAX_DEPTH} deep"):
        encode(cycle, other)


def test_dates_fractions_and_decimals_keep_their_type() -> None:
    values = [datetime.date(2026, 1, 2), fractions.Fraction(1, 3), decimal.Decimal("1.10"), datetime.timedelta(1, 2, 3)]
    assert [repr(value) for value in through(values)] == [repr(value) for value in values]


@pytest.mark.parametrize("data", [["l"], ["?", 1], [], [[]], ["r", "a"], ["s", [["l", []]]], ["i", "zz"], {"a": 1}])
def test_what_was_not_written_by_encode_is_refused(data: Any) -> None:
    def refuse(unknown: Any) -> Any:
        raise ValueError(unknown)

    with pytest.raises((ValueError, TypeError, LookupError)):
        decode(data, refuse)
