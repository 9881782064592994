"""Messages over pipes: four bytes of length, then JSON."""

from __future__ import annotations

import json
import os
import struct
from typing import Any

MAX_MESSAGE_BYTES = 4 << 20
"""Of one message between a program and its tests."""


class Closed(Exception):
    """The other end is gone, or does not keep to the form."""


class TooLong(ValueError):
    """A message that is longer than may be sent."""


def send(descriptor: int, message: Any) -> None:
    """Raises Closed, and TooLong before anything is written."""
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) > MAX_MESSAGE_BYTES:
        raise TooLong(f"a value of {len(data)} bytes is longer than the {MAX_MESSAGE_BYTES} that may be passed")
    view = memoryview(struct.pack("I", len(data)) + data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except OSError as error:
            raise Closed from error


def receive(descriptor: int) -> Any:
    """The next message. Raises Closed."""
    (length,) = struct.unpack("I", _exactly(descriptor, 4))
    if length > MAX_MESSAGE_BYTES:
        raise Closed
    try:
        return json.loads(_exactly(descriptor, length))
    except (ValueError, RecursionError) as error:
        raise Closed from error


def _exactly(descriptor: int, count: int) -> bytes:
    parts = []
    while count:
        try:
            part = os.read(descriptor, min(count, 1 << 20))
        except OSError as error:
            raise Closed from error
        if not part:
            raise Closed
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
