"""Keyset pages: a cursor names the last row seen, so rows inserted meanwhile make none repeat or vanish."""

from __future__ import annotations

import base64
import binascii
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Generic, TypeVar

from pydantic import Field
from sqlalchemy import ColumnElement, and_, false, or_

from app.errors import BadRequest

T = TypeVar("T")
MAX_LIMIT = 200
MAX_WHOLE_NUMBER = (1 << 31) - 1
WholeNumber = Annotated[int, Field(ge=0, le=MAX_WHOLE_NUMBER)]
"""A step, attempt or batch in an address: what its column can hold."""


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    items: list[T]
    next_cursor: str | None
    """Give it back as `cursor` for the next page; None on the last page."""


@dataclass(frozen=True, slots=True)
class Key:
    """One column of an order. Rows where it is null come last in either direction."""

    column: ColumnElement[Any]
    descending: bool = False
    nullable: bool = False

    def order(self) -> list[ColumnElement[Any]]:
        direction = self.column.desc() if self.descending else self.column.asc()
        return [self.column.is_(None), direction] if self.nullable else [direction]

    def after(self, value: Any) -> ColumnElement[bool]:
        if value is None:
            return false()
        later = self.column < value if self.descending else self.column > value
        return or_(later, self.column.is_(None)) if self.nullable else later

    def equal(self, value: Any) -> ColumnElement[bool]:
        return self.column.is_(None) if value is None else self.column == value


def order_by(keys: Sequence[Key]) -> list[ColumnElement[Any]]:
    return [clause for key in keys for clause in key.order()]


def after(keys: Sequence[Key], values: Sequence[Any]) -> ColumnElement[bool]:
    """Rows behind the one whose keys have `values`; the last key must be unique."""
    if len(keys) != len(values) or not all(map(_fits, keys, values)):
        raise BadRequest("The cursor belongs to another order; start again without one.")
    branches = []
    for index, (key, value) in enumerate(zip(keys, values, strict=True)):
        same = [earlier.equal(known) for earlier, known in zip(keys[:index], values[:index], strict=True)]
        branches.append(and_(*same, key.after(value)))
    return or_(*branches)


def _fits(key: Key, value: Any) -> bool:
    """Whether the column could hold this value."""
    kind = key.column.type.python_type
    if isinstance(value, int):
        return kind in (int, float) and abs(value) <= MAX_WHOLE_NUMBER
    return value is None or isinstance(value, kind)


def encode_cursor(order: str, values: Sequence[Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps([order, list(map(_plain, values))]).encode()).decode().rstrip("=")


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return {"time": value.isoformat()}
    return {"id": value.hex} if isinstance(value, uuid.UUID) else value


def decode_cursor(order: str, cursor: str) -> list[Any]:
    """The values inside a cursor made for the same order. Raises BadRequest when it is not one."""
    try:
        made_for, values = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        if made_for != order or not isinstance(values, list):
            raise ValueError(made_for)
        return [_value(value) for value in values]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, binascii.Error) as error:
        raise BadRequest(f"cursor {cursor[:80]!r} does not belong to this list; start again without one.") from error


def _value(value: Any) -> Any:
    if isinstance(value, dict):
        if "id" in value:
            return uuid.UUID(value["id"])
        time = datetime.fromisoformat(value["time"])
        if time.tzinfo is None:
            raise ValueError("a time without its zone")
        return time
    if isinstance(value, list):
        raise TypeError("a cursor holds plain values")
    return value


def checked_limit(limit: int) -> int:
    return max(1, min(limit, MAX_LIMIT))
