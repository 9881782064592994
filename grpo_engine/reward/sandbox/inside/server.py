"""The fork server of one slot: it forks what a job needs, confined, and kills it when its time is over.

It holds no program, no test and no output: those go by descriptors straight between the pool and the confined
processes, so that what a later job finds in its memory, which was this process's, tells nothing of another job.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from . import candidate, examiner, landlock, script, wire
from .confine import Cell, Limits, own_address_space

_PRELOADED = (
    "abc ast array base64 bisect calendar cmath collections collections.abc contextlib copy csv dataclasses datetime "
    "decimal enum fractions functools hashlib heapq inspect io itertools json keyword locale math numbers operator os "
    "pathlib queue random re secrets statistics string struct sys tempfile textwrap threading time traceback types "
    "typing unicodedata unittest uuid warnings zlib"
)
_ENVIRONMENT = {"PATH", "LANG", "HOME"}
_PROGRAM, _TESTS = 0, 1  # roles
_TICK_S = 0.02
_PATIENCE_S = 0.2
_MAX_FILES = 4096
_COUNT_S = 5.0


class Server:
    """Serves one job at a time over a socket: a JSON header and descriptors in, a JSON line out."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._control = socket.socket(fileno=settings["control"])
        self._folder: str = settings["folder"]
        self._kept: list[int] = settings["kept"]
        self._counts_user: bool = settings["counts_user"]
        self._counted = (0.0, 0)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(4, 0, 0, 0, 0)  # not dumpable: a process of the same user cannot read its memory
        read = [(path, landlock.READ) for path in settings["read"]]
        devices = [("/dev/null", landlock.DEVICE), ("/dev/urandom", landlock.READ), ("/dev/zero", landlock.READ)]
        folder = (self._folder, landlock.FLAT_FOLDER)
        rules = None
        if settings["landlock"]:
            rules = [landlock.ruleset(libc, [*read, *devices, folder]), landlock.ruleset(libc, [*read, *devices])]
        self._rules = rules or []
        self._cell = Cell(libc, rules, settings["uids"])
        self._null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        self._base_bytes = own_address_space()
        self._wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Until the pool closes its end."""
        self._control.sendall(b'{"ready": true}\n')
        while True:
            header, descriptors = self._next()
            if not header:
                return
            try:
                answer = self._job(json.loads(header), descriptors)
            except OSError as error:
                answer = {"refused": f"{type(error).__name__}: {error}"[:200]}
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            self._clean()
            self._control.sendall(json.dumps(answer).encode() + b"\n")

    def _next(self) -> tuple[bytes, list[int]]:
        room = socket.CMSG_SPACE(8 * struct.calcsize("i"))
        data, ancillary, *_ = self._control.recvmsg(4096, room, socket.MSG_CMSG_CLOEXEC)
        descriptors: list[int] = []
        for _level, _kind, packed in ancillary:
            descriptors += struct.unpack(f"{len(packed) // 4}i", packed[: len(packed) // 4 * 4])
        return data, descriptors

    def _job(self, header: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        started: dict[str, int] = {}
        try:
            if header["kind"] == "check":
                self._start_check(started, header, *descriptors)
            else:
                self._start_script(started, header, *descriptors)
            return self._watch(started, time.monotonic() + header["time_limit_s"], header["folder_bytes"])
        finally:
            for pid in started.values():  # only when something raised
                self._kill(pid)
                os.waitpid(pid, 0)

    def _start_check(
        self, started: dict[str, int], header: dict[str, Any], program: int, tests: int, output: int, verdict: int
    ) -> None:
        asked, asks = os.pipe2(os.O_CLOEXEC)
        answered, answers = os.pipe2(os.O_CLOEXEC)
        try:
            kept = [program, asked, answers]
            main = lambda: candidate.serve(_read(program), asked, answers)  # noqa: E731
            started["program"] = self._fork(_PROGRAM, header, [self._null, output, output], kept, main)
            kept = [tests, asks, answered, verdict]
            main = lambda: examiner.examine(_read(tests), asks, answered, verdict)  # noqa: E731
            started["tests"] = self._fork(_TESTS, header, [self._null] * 3, kept, main)
        finally:
            for descriptor in (asked, asks, answered, answers):
                os.close(descriptor)

    def _start_script(
        self, started: dict[str, int], header: dict[str, Any], program: int, given: int, out: int, errors: int, end: int
    ) -> None:
        main = lambda: script.run(_read(program), end)  # noqa: E731
        started["program"] = self._fork(_PROGRAM, header, [given, out, errors], [program, end], main)

    def _fork(
        self, role: int, header: dict[str, Any], standard: list[int], kept: list[int], main: Callable[[], None]
    ) -> int:
        limits = Limits(
            header["cpu_s"],
            self._base_bytes + header["memory_bytes"],
            header["file_bytes"],
            header["max_processes"] + self._others_of_user(),
        )
        server = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        self._confined(server, role, limits, standard, kept, main)

    def _confined(
        self, server: int, role: int, limits: Limits, standard: list[int], kept: list[int], main: Callable[[], None]
    ) -> NoReturn:
        """In the forked process: nothing but `kept` stays open, then confine, then run."""
        status = 1
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for target, source in enumerate(standard):
                os.dup2(source, target)
            self._close_others([*kept, *self._kept, *self._rules])
            os.environ["TMPDIR"] = self._folder
            self._cell.enter(server, role, limits, self._folder if role == _PROGRAM else "/")
            main()
            status = 0
        except wire.Closed:  # the tests are through
            sys.stdout.flush()
            status = 0
        except BaseException as error:
            with contextlib.suppress(BaseException):
                sys.stderr.write(f"{type(error).__name__}: {error}\n")
                sys.stderr.flush()
        finally:
            os._exit(status)

    def _close_others(self, kept: list[int]) -> None:
        low = 3
        for descriptor in sorted(kept):
            os.closerange(low, descriptor)
            low = descriptor + 1
        os.closerange(low, 1 << 20)

    def _watch(self, started: dict[str, int], deadline: float, folder_bytes: int) -> dict[str, Any]:
        """Wait for the last of the processes to be waited for, or the deadline, a full folder, or the pool's end."""
        last = "tests" if "tests" in started else "program"
        ended: dict[str, list[float]] = {}
        waiting = select.poll()
        waiting.register(self._wake, select.POLLIN)
        waiting.register(self._control, select.POLLRDHUP | select.POLLHUP)
        why = ""
        while last not in ended and not why:
            left = deadline - time.monotonic()
            why = "time" if left <= 0 else "files" if self._is_overfull(folder_bytes) else ""
            events = [] if why else waiting.poll(max(1, min(left, _TICK_S) * 1000))
            if any(descriptor == self._control.fileno() for descriptor, _ in events):
                why = "pool"
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4096)
            _reap(started, ended)
        self._end_all(started, ended, bool(why))
        return {"why": why, "ended": ended}

    def _end_all(self, started: dict[str, int], ended: dict[str, list[float]], at_once: bool) -> None:
        """Kill what is left. A program whose tests are through ends by itself, with a status that says why it went."""
        patience_ends = time.monotonic() + (0 if at_once else _PATIENCE_S)
        while started and time.monotonic() < patience_ends:
            _reap(started, ended)
            if started:
                select.select([self._wake], [], [], _TICK_S / 10)
        for name, pid in list(started.items()):
            self._kill(pid)
            _, status, usage = os.wait4(pid, 0)
            ended[name] = [status, usage.ru_utime + usage.ru_stime]
            del started[name]

    def _kill(self, pid: int) -> None:
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)

    def _is_overfull(self, folder_bytes: int) -> bool:
        with os.scandir(self._folder) as entries:
            return is_overfull(entries, folder_bytes)

    def _clean(self) -> None:
        with os.scandir(self._folder) as entries:
            for entry in entries:
                os.unlink(entry.path)

    def _others_of_user(self) -> int:
        """Threads of this user on the host, where the kernel counts them against a program's limit."""
        if not self._counts_user:
            return 0
        when, count = self._counted
        if time.monotonic() - when > _COUNT_S or not count:
            self._counted = (time.monotonic(), _threads_of(os.getuid()))
        return self._counted[1]


def is_overfull(entries: Iterable[os.DirEntry[str]], folder_bytes: int) -> bool:
    """Whether files of one folder are too many, or take more room. One that goes away meanwhile hides no other."""
    size = 0
    for count, entry in enumerate(entries, 1):
        with contextlib.suppress(OSError):
            size += entry.stat(follow_symlinks=False).st_blocks * 512
        if count > _MAX_FILES:
            return True
    return size > folder_bytes


def _reap(started: dict[str, int], ended: dict[str, list[float]]) -> None:
    for name, pid in list(started.items()):
        reaped, status, usage = os.wait4(pid, os.WNOHANG)
        if reaped:
            ended[name] = [status, usage.ru_utime + usage.ru_stime]
            del started[name]


def _threads_of(uid: int) -> int:
    count = 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def _read(descriptor: int) -> bytes:
    """All of a file in memory, and close it."""
    size = os.fstat(descriptor).st_size
    data = os.pread(descriptor, size, 0)
    os.close(descriptor)
    return data


def main() -> None:
    settings = json.loads(sys.argv[1])
    for name in _PRELOADED.split():
        importlib.import_module(name)
    server = Server(settings)
    for name in set(os.environ) - _ENVIRONMENT:
        del os.environ[name]
    gc.collect()
    gc.freeze()
    try:
        server.serve()
    finally:
        with contextlib.suppress(OSError):
            os.rmdir(settings["folder"])
            os.rmdir(os.path.dirname(settings["folder"]))
