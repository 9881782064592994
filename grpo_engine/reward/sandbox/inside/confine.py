"""A freshly forked process gives up everything but what a program may use. Nothing of the program has run before."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
from dataclasses import dataclass
from pathlib import Path

from . import landlock, seccomp

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_OPEN_FILES = 64
_STACK_BYTES = 8 << 20
_PAGE_BYTES = resource.getpagesize()


@dataclass(frozen=True)
class Limits:
    """What one process may use."""

    cpu_s: int
    memory_bytes: int
    """Address space beyond the interpreter's own."""
    file_bytes: int
    max_processes: int
    """Threads, counted for the user as the kernel does."""


class Cell:
    """What every confined process of one server needs, made once: rules, filter, users."""

    def __init__(self, libc: ctypes.CDLL, rules: list[int] | None, uids: list[int] | None) -> None:
        """`rules`: Landlock descriptors, one for each role; `uids`: one for each role; None: not confined so."""
        self.libc = libc
        self._rules = rules
        self._uids = uids
        self._filter = seccomp.Filter() if seccomp.supported() else None

    def enter(self, server: int, role: int, limits: Limits, folder: str) -> None:
        """Confine the calling process: own session already made, descriptors already closed. Raises OSError, also when
        `server`, which forked it, has ended."""
        os.chdir(folder)
        _limit(limits)
        if self._uids is not None:
            os.setgroups([])
            os.setresgid(self._uids[role], self._uids[role], self._uids[role])
            os.setresuid(self._uids[role], self._uids[role], self._uids[role])
        # After the change of user, which takes the death signal back.
        self._prctl(_PR_SET_NO_NEW_PRIVS, 1)
        self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:  # nobody would be left to end this process
            raise ProcessLookupError(errno.ESRCH, "the sandbox's server has ended")
        self._prctl(_PR_SET_DUMPABLE, 0)
        if self._rules is not None:
            landlock.restrict(self.libc, self._rules[role])
            for descriptor in self._rules:
                os.close(descriptor)
        if self._filter is not None:
            self._filter.install(self.libc, os.getpid())

    def _prctl(self, option: int, value: int) -> None:
        if self.libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option}) refused")


def own_address_space() -> int:
    """Bytes of address space of this process; of a forked one it is the same."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE_BYTES


def _limit(limits: Limits) -> None:
    values = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: limits.file_bytes,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_NPROC: limits.max_processes,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_STACK: _STACK_BYTES,
        resource.RLIMIT_AS: limits.memory_bytes,
    }
    for which, value in values.items():
        hard = resource.getrlimit(which)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (bound, bound))
    # The first second over the limit is told by SIGXCPU, so that it is known why the process ended.
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 1))
