"""Rows of a C loop shared out among threads: ctypes lets go of Python's lock while C runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import torch


def in_threads(loop: Callable[[int, int], Any], rows: int, *, is_much: bool) -> list[Any]:
    """What `loop(begin, end)` returns, over as many parts of the rows as torch uses threads; one where little is to
    be done."""
    threads = min(torch.get_num_threads(), rows) if is_much else 1
    if threads <= 1:
        return [loop(0, rows)]
    bounds = [rows * part // threads for part in range(threads + 1)]
    return list(_pool(torch.get_num_threads()).map(lambda part: loop(*part), pairwise(bounds)))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="rows")
