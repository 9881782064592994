"""One engine, several threads: whoever waits gets the next turn."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """A lock that a thread which takes it again and again cannot keep from the others."""

    def __init__(self) -> None:
        self._next = threading.Lock()
        self._engine = threading.Lock()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The engine to this thread alone, until the end of the block."""
        with self._next:
            self._engine.acquire()
        try:
            yield
        finally:
            self._engine.release()
