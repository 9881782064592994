from __future__ import annotations

import uuid
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import BadRequest
from app.models import Checkpoint, Run
from app.paging import Key, after, decode_cursor, encode_cursor

values = st.one_of(st.none(), st.integers(), st.floats(allow_nan=False), st.text(), st.booleans())


@given(st.text(max_size=20), st.lists(values, max_size=4))
def test_a_cursor_gives_back_what_was_put_in(order: str, inside: list[object]) -> None:
    assert decode_cursor(order, encode_cursor(order, inside)) == inside


def test_a_time_survives_to_the_microsecond() -> None:
    time = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    assert decode_cursor("runs", encode_cursor("runs", [time])) == [time]


@given(st.text(max_size=60))
def test_no_text_is_more_than_a_bad_request(cursor: str) -> None:
    with pytest.raises(BadRequest):
        decode_cursor("an order that nobody uses", cursor)


def test_a_cursor_of_another_order_is_refused() -> None:
    with pytest.raises(BadRequest, match="does not belong"):
        decode_cursor("-number", encode_cursor("name", ["a", 1]))


def test_an_id_survives() -> None:
    known = uuid.uuid4()
    assert decode_cursor("checkpoints", encode_cursor("checkpoints", [known])) == [known]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (Key(Run.number.expression), 10**30),
        (Key(Run.number.expression), "1"),
        (Key(Run.created_at.expression), "2026-01-01"),
        (Key(Checkpoint.id.expression), "no id"),
        (Key(Run.name.expression), 1),
    ],
)
def test_what_a_column_cannot_hold_is_no_place_in_a_list(key: Key, value: object) -> None:
    with pytest.raises(BadRequest, match="another order"):
        after([key], [value])


def test_a_time_without_a_zone_is_no_place_in_a_list() -> None:
    with pytest.raises(BadRequest):
        decode_cursor("runs", encode_cursor("runs", [datetime(2026, 1, 2)]))
