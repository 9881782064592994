"""JSON messages between the engine and its reward processes, over a socket, with a deadline.

A message is its length in 8 bytes, big-endian, and JSON in ASCII (NaN and lone surrogates pass, as Python writes them).
"""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any

_LENGTH = struct.Struct(">Q")
_CHUNK = 1 << 20


class PeerGone(Exception):
    """The other side closed the socket."""


def send(connection: socket.socket, value: Any, deadline: float | None = None) -> None:
    """Raises TimeoutError past the deadline (time.monotonic; None waits for ever), PeerGone when nobody listens."""
    body = json.dumps(value).encode()
    connection.settimeout(_left(deadline))
    try:
        connection.sendall(_LENGTH.pack(len(body)) + body)
    except ConnectionError as error:
        raise PeerGone(str(error)) from error


def receive(connection: socket.socket, deadline: float | None = None) -> Any:
    """The next message. Raises as `send` does."""
    [length] = _LENGTH.unpack(_exactly(connection, _LENGTH.size, deadline))
    return json.loads(_exactly(connection, length, deadline))


def _exactly(connection: socket.socket, count: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < count:
        connection.settimeout(_left(deadline))
        try:
            piece = connection.recv(min(_CHUNK, count - len(data)))
        except ConnectionError as error:
            raise PeerGone(str(error)) from error
        if not piece:
            raise PeerGone("the connection was closed")
        data += piece
    return bytes(data)


def _left(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0:  # settimeout(0) would mean: do not wait at all
        raise TimeoutError
    return left
