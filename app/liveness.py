"""Who a process is, so that a later one with the same number is not taken for it, and how long it has been silent."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    boot_id: str
    """One boot of one host and one pid namespace of it: only within these does a process number mean anything."""
    pid: int
    process_started: int
    """Clock ticks since boot (field 22 of /proc/<pid>/stat)."""

    @classmethod
    def own(cls) -> ProcessIdentity:
        pid = os.getpid()
        started = start_ticks(pid)
        assert started is not None
        return cls(boot_id(), pid, started)


@lru_cache
def boot_id() -> str:
    """Names this boot and pid namespace; containers on one host differ."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return str(uuid.uuid5(uuid.UUID(boot), os.readlink("/proc/self/ns/pid")))


def start_ticks(pid: int) -> int | None:
    """When a living process started; None when there is none (a zombie has ended)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


def exists(pid: int, process_started: int) -> bool:
    """Whether exactly this process of this host still lives."""
    return start_ticks(pid) == process_started


class Stillness:
    """For how long each counter has not moved, counted from when this watcher first saw it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[Hashable, tuple[int, float]] = {}

    def seconds(self, key: Hashable, counter: int) -> float:
        now = self._clock()
        known = self._seen.get(key)
        if known is None or known[0] != counter:
            self._seen[key] = counter, now
            return 0.0
        return now - known[1]

    def keep_only(self, keys: set[Hashable]) -> None:
        self._seen = {key: value for key, value in self._seen.items() if key in keys}

    def forget(self) -> None:
        """Begin anew: while the database was away, nobody could beat."""
        self._seen.clear()
