"""Wait for a condition with a deadline, instead of sleeping."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T], seconds: float, what: str) -> T:
    """Poll until `condition()` is truthy and return it; AssertionError naming `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while True:
        result = condition()
        if result:
            return result
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        pause.wait(0.02)
