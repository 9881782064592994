"""Plain values as JSON: the only thing that goes between a program and its tests.

None, bool, str, small int and finite float are themselves; everything else is a list that begins with its tag. Exact
types come out: a subclass (Counter, namedtuple, IntEnum) is reduced to the type below it where it is written. What is
no plain value is left to the side that writes (`other`), such as a number under which it keeps the object.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

MAX_DEPTH = 120
"""Containers inside each other."""
MAX_ITEMS = 10_000
"""Items drawn from an iterator."""
_SMALL = 1 << 63

Other = Callable[[Any], Any]

_Json = Any  # what json.loads gives


def encode(value: Any, other: Other, depth: int = 0) -> _Json:
    """`value` as JSON. `other` encodes what is no plain value. Raises ValueError when it is nested too deeply."""
    if value is None or type(value) in (bool, str):
        return value
    if depth > MAX_DEPTH:
        raise ValueError(f"a value is nested more than {MAX_DEPTH} deep")
    if isinstance(value, (int, float, complex, str)):
        return _number_or_text(value)
    for kind, tag in _SEQUENCES:
        if isinstance(value, kind):
            return [tag, [encode(item, other, depth + 1) for item in value]]
    if isinstance(value, dict):
        pairs = dict.items(value)
        return ["d", [[encode(key, other, depth + 1), encode(item, other, depth + 1)] for key, item in pairs]]
    rare = _rare(value)
    if rare is not None:
        return rare
    if isinstance(value, _DRAWN) or _is_iterator(value):
        drawn = itertools.islice(iter(value), MAX_ITEMS)
        return ["y" if isinstance(value, Iterator) else "l", [encode(item, other, depth + 1) for item in drawn]]
    return other(value)


def decode(data: _Json, other: Other) -> Any:
    """The value again; `other` decodes tags it does not know. Raises ValueError or TypeError on what was not written by
    `encode`."""
    if data is None or isinstance(data, (bool, str, int, float)):
        return data
    tag, content = data[0], data[1:]
    if tag in _CONTAINERS:
        return _CONTAINERS[tag]([decode(item, other) for item in content[0]])
    if tag == "d":
        return {decode(key, other): decode(item, other) for key, item in content[0]}
    if tag in _SCALARS:
        return _SCALARS[tag](*content)
    return other(data)


_SEQUENCES = ((list, "l"), (tuple, "t"), (frozenset, "z"), (set, "s"))
_CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    "l": list, "t": tuple, "z": frozenset, "s": set, "y": iter,
}  # fmt: skip
_SCALARS: dict[str, Callable[..., Any]] = {
    "i": lambda digits: int(digits, 16),
    "f": lambda name: float(name) if name in ("nan", "inf", "-inf") else math.nan,
    "c": lambda real, imaginary: complex(decode(real, _refuse), decode(imaginary, _refuse)),
    "b": bytes.fromhex,
    "a": bytearray.fromhex,
    "r": range,
    "D": decimal.Decimal,
    "F": lambda above, below: fractions.Fraction(int(above, 16), int(below, 16)),
    "dt": datetime.datetime.fromisoformat,
    "da": datetime.date.fromisoformat,
    "ti": datetime.time.fromisoformat,
    "td": lambda days, seconds, micro: datetime.timedelta(days, seconds, micro),
}
_DRAWN: tuple[type, ...] = (collections.deque, type({}.keys()), type({}.values()), type({}.items()))


def _number_or_text(value: complex | str) -> _Json:
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__int__(value)
        return number if -_SMALL <= number < _SMALL else ["i", hex(number)]
    if isinstance(value, float):
        number_f = float.__float__(value)
        return number_f if math.isfinite(number_f) else ["f", repr(number_f)]
    return ["c", _number_or_text(value.real), _number_or_text(value.imag)]


def _rare(value: Any) -> _Json:
    if isinstance(value, (bytes, bytearray)):
        return ["a" if isinstance(value, bytearray) else "b", bytes(value).hex()]
    if isinstance(value, range):
        return ["r", value.start, value.stop, value.step]
    if isinstance(value, decimal.Decimal):
        return ["D", str(value)]
    if isinstance(value, fractions.Fraction):
        return ["F", hex(value.numerator), hex(value.denominator)]
    if isinstance(value, datetime.datetime):
        return ["dt", value.isoformat()]
    if isinstance(value, (datetime.date, datetime.time)):
        return ["da" if isinstance(value, datetime.date) else "ti", value.isoformat()]
    if isinstance(value, datetime.timedelta):
        return ["td", value.days, value.seconds, value.microseconds]
    return None


def _is_iterator(value: Any) -> bool:
    return isinstance(value, Iterator) and not isinstance(value, type)


def _refuse(data: Any) -> Any:
    raise ValueError("not a plain value")
