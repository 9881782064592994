"""Starts the ranks of an engine, watches them and leaves none behind. Torch-free.

Every rank leads a session of its own, so a signal meant for the terminal or the worker does not hit it first. It dies
with its parent (see control.py); the parent is a subreaper, so what a rank leaves behind comes to it and is killed.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from grpo_engine.control import CONTROL_FD, PARENT_PID

LAUNCH_ID = "COHORT_LAUNCH"
"""Marks every process of one launch, so that orphans are told from other children of the parent."""

RENDEZVOUS_FD = "COHORT_RENDEZVOUS_FD"
"""Rank 0's descriptor of the socket that listens on MASTER_PORT."""
FAILURE_GRACE_S = 10.0
"""After another rank failed, for rank 0 to journal the cause and end by itself."""

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Ranks of one host talk over its loopback: no name of the host to resolve, nothing open to the network."""

_PR_SET_CHILD_SUBREAPER = 36
_PAUSE_S = 0.01


class Ranks:
    """Processes of one engine, rank by rank."""

    def __init__(
        self,
        processes: Sequence[subprocess.Popen[bytes]],
        pipes: Sequence[int],
        launch_id: str,
        failure_grace_s: float = FAILURE_GRACE_S,
    ) -> None:
        self.pids = [process.pid for process in processes]
        self.failed_rank: int | None = None
        """The rank that failed first, whose exit status `poll` returns; None while none failed."""
        self._processes = list(processes)
        self._pipes = list(pipes)
        self._launch_id = launch_id
        self._failure_grace_s = failure_grace_s
        self._first_code = 0
        self._grace_ends = 0.0
        self._code: int | None = None

    def send(self, message: Mapping[str, object]) -> None:
        """Write one JSON line to every rank. A rank that has ended, or never reads, misses it; later ones follow."""
        line = json.dumps(message, allow_nan=False).encode() + b"\n"
        if len(line) > select.PIPE_BUF:  # up to this, a write is whole or not at all
            raise ValueError(f"a control message of {len(line)} bytes is too long to be written at once")
        for pipe in self._pipes:
            try:
                os.write(pipe, line)
            except (BrokenPipeError, BlockingIOError):
                continue

    def poll(self) -> int | None:
        """None while running; 0 when all ended well; else the exit status (negative: signal) of the rank that failed.

        When rank 0 fails the others are killed; when another fails, rank 0 has the grace to journal the cause first.
        Nothing of the launch is left once this returns a number.
        """
        if self._code is not None:
            return self._code
        codes = [process.poll() for process in self._processes]
        self._note_failure(codes)
        if self.failed_rank is None:
            return self._end(0) if all(code == 0 for code in codes) else None
        if codes[0] is None and time.monotonic() < self._grace_ends:
            return None
        return self._end(self._first_code)

    def terminate(self) -> None:
        """Ask every rank to write a checkpoint and end (SIGTERM)."""
        for process in self._processes:
            process.send_signal(signal.SIGTERM)

    def stop(self, grace_s: float) -> int:
        """SIGTERM, SIGKILL after `grace_s`; the exit status as `poll` tells it, when no descendant is left."""
        self.terminate()
        deadline = time.monotonic() + grace_s
        while (code := self.poll()) is None:
            if time.monotonic() >= deadline:
                self.kill()
            time.sleep(_PAUSE_S)
        return code

    def kill(self) -> None:
        """SIGKILL to every descendant, until none is left."""
        killed: set[int] = set()
        # A rank whose main thread is a zombie may still have threads that hold its memory and devices.
        while (living := self._descendants()) or any(process.poll() is None for process in self._processes):
            for pid in living:
                _kill(pid)
            killed |= living
            self._reap(killed)
            time.sleep(_PAUSE_S)
        self._reap(killed)

    def _note_failure(self, codes: Sequence[int | None]) -> None:
        """Remember the first cause. Of failures seen at once a signal comes first, then ranks other than 0: rank 0 ends
        with a status of its own when it has journaled another's failure, the others a while after rank 0's."""
        failures = [(code >= 0, rank == 0, rank, code) for rank, code in enumerate(codes) if code]
        if failures and self.failed_rank is None:
            *_, self.failed_rank, self._first_code = min(failures)
            self._grace_ends = time.monotonic() + self._failure_grace_s

    def _end(self, code: int) -> int:
        self.kill()
        for pipe in self._pipes:
            os.close(pipe)
        self._pipes.clear()
        self._code = code
        return code

    def _descendants(self) -> set[int]:
        """Living processes below the ranks, and orphans of this launch that came to this process."""
        children: dict[int, list[int]] = {}
        for pid, (parent, state) in process_table().items():
            if state not in "ZX":
                children.setdefault(parent, []).append(pid)
        ours = set(self.pids)
        mine = [pid for pid in children.get(os.getpid(), []) if pid in ours or self._is_marked(pid)]
        found: set[int] = set()
        while mine:
            pid = mine.pop()
            found.add(pid)
            mine.extend(child for child in children.get(pid, []) if child not in found)
        return found

    def _is_marked(self, pid: int) -> bool:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False
        return f"{LAUNCH_ID}={self._launch_id}".encode() in environment.split(b"\0")

    def _reap(self, killed: set[int]) -> None:
        """Collect exit statuses: of the ranks, of the orphans we killed, of those that ended in a rank's session."""
        for process in self._processes:
            process.poll()
        for pid, (parent, state) in process_table().items():
            if parent != os.getpid() or state != "Z" or pid in self.pids:
                continue
            if pid in killed or _session(pid) in self.pids:
                os.waitpid(pid, os.WNOHANG)


def start_ranks(
    argv: Sequence[str],
    *,
    num_ranks: int,
    log_path: Path,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    failure_grace_s: float = FAILURE_GRACE_S,
) -> Ranks:
    """Start `argv` once a rank, output appended to `log_path`, and return without waiting for anything.

    `env` is added to this process's environment. `pass_fds` stay open in every rank (device locks).
    Raises RuntimeError outside the main thread: the kernel's parent-death signal follows the starting thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("ranks must be started from the main thread; they die with the thread that starts them")
    become_subreaper()
    launch_id = uuid.uuid4().hex
    meeting = listen()
    shared = LOOPBACK | os.environ | dict(env or {}) | _rendezvous(num_ranks, meeting) | {LAUNCH_ID: launch_id}
    processes: list[subprocess.Popen[bytes]] = []
    pipes: list[int] = []
    ranks = None
    try:
        for rank in range(num_ranks):
            process, pipe = _start_rank(argv, rank, log_path, shared, pass_fds, meeting)
            processes.append(process)
            pipes.append(pipe)
        ranks = Ranks(processes, pipes, launch_id, failure_grace_s)
    finally:
        meeting.close()
        if ranks is None:  # a rank could not be started: end those before it
            Ranks(processes, pipes, launch_id).stop(0)
    return ranks


def become_subreaper() -> None:
    """Orphans among this process's descendants come to it instead of to init."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def _start_rank(
    argv: Sequence[str],
    rank: int,
    log_path: Path,
    shared: Mapping[str, str],
    pass_fds: Sequence[int],
    meeting: socket.socket,
) -> tuple[subprocess.Popen[bytes], int]:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), CONTROL_FD: str(reading)}
    if rank == 0:
        own[RENDEZVOUS_FD] = str(meeting.fileno())
        pass_fds = [*pass_fds, meeting.fileno()]
    try:
        with open(log_path, "ab") as log:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**shared, **own},
                pass_fds=[reading, *pass_fds],
                start_new_session=True,
            )
    except BaseException:
        os.close(writing)
        raise
    finally:
        os.close(reading)
    return process, writing


def listen() -> socket.socket:
    """The port where ranks meet, held from now on: rank 0 inherits it, so nobody can take it while torch is loading,
    and a rank that comes before rank 0 waits in its queue."""
    meeting = socket.socket()
    meeting.bind(("127.0.0.1", 0))
    meeting.listen(1024)
    return meeting


def _rendezvous(num_ranks: int, meeting: socket.socket) -> dict[str, str]:
    return {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(meeting.getsockname()[1]),
        PARENT_PID: str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
    }


def process_table() -> dict[int, tuple[int, str]]:
    """pid -> (parent's pid, state) of every process of this host."""
    table: dict[int, tuple[int, str]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            stat = Path(f"/proc/{name}/stat").read_text(errors="replace")
        except OSError:
            continue
        state, parent = stat[stat.rindex(")") + 2 :].split(" ", 2)[:2]
        table[int(name)] = int(parent), state
    return table


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None
