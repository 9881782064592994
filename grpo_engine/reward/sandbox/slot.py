"""One slot: a warm server and what is asked of it, seen from the pool."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from grpo_engine.reward.sandbox.tiers import Started, Tier, start

START_LIMIT_S = 120.0
"""For a server to be ready."""
GRACE_S = 10.0
"""Beyond a job's time limit, for the server to end it; after that the server itself is ended."""
_CHUNK_BYTES = 1 << 16
_SEALS = 0x1 | 0x2 | 0x4 | 0x8  # F_SEAL_SEAL, SHRINK, GROW, WRITE: nobody can change what was handed over


class SlotLost(Exception):
    """The server ended, or does not answer."""


@dataclass
class Stream:
    """What comes out of a confined process: the first or the last `limit_bytes` are kept."""

    limit_bytes: int
    tail: bool = False
    data: bytearray = field(default_factory=bytearray)
    cut: bool = False

    def add(self, chunk: bytes) -> None:
        room = self.limit_bytes - len(self.data)
        self.cut = self.cut or len(chunk) > room
        self.data += chunk if self.tail else chunk[:room]
        if self.tail:
            del self.data[: -self.limit_bytes]


@dataclass
class Request:
    """One thing a server does: files it hands to the confined processes, streams that come from them."""

    header: dict[str, object]
    files: Sequence[bytes]
    streams: Sequence[Stream]
    time_limit_s: float


@dataclass
class Reply:
    """How it ended."""

    why: str = ""
    """Empty: by itself; `time`, `files`: ended by the server."""
    refused: str = ""
    ended: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Role -> wait status, CPU seconds."""
    wall_s: float = 0.0


class Slot:
    """Starts its server when asked to; one request at a time."""

    def __init__(self, tier: Tier, number: int, folder_bytes: int) -> None:
        self._control, theirs = socket.socketpair()
        try:
            self._started: Started = start(tier, number, theirs.fileno(), folder_bytes)
        finally:
            theirs.close()
        self._control.setblocking(False)
        self._line = bytearray()
        self._streams: dict[int, Stream] = {}
        self._since = time.monotonic()
        self._deadline = self._since + START_LIMIT_S
        self.ready = False
        """Whether it waits for a request."""

    @property
    def pid(self) -> int:
        return self._started.process.pid

    def seconds_left(self) -> float:
        """Until the server counts as lost."""
        return float("inf") if self.ready else self._deadline - time.monotonic()

    def descriptors(self) -> list[int]:
        """What to wait for."""
        return [self._control.fileno(), *self._streams]

    def submit(self, request: Request) -> None:
        """Raises SlotLost."""
        header = json.dumps(request.header | {"time_limit_s": request.time_limit_s}).encode()
        handed = [_file(data) for data in request.files]
        try:
            for stream in request.streams:
                ours, theirs = os.pipe2(os.O_CLOEXEC)
                os.set_blocking(ours, False)
                self._streams[ours] = stream
                handed.append(theirs)
            socket.send_fds(self._control, [header], handed)
        except OSError as error:
            raise SlotLost(f"{error}{self._last_words()}") from error
        finally:
            for descriptor in handed:
                os.close(descriptor)
        self.ready = False
        self._since = time.monotonic()
        self._deadline = self._since + request.time_limit_s + GRACE_S

    def read(self) -> Reply | None:
        """Take what has come; the reply when the request is through. Raises SlotLost."""
        for descriptor in list(self._streams):
            self._take(descriptor)
        try:
            part = self._control.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            raise SlotLost(str(error)) from error
        if not part:
            raise SlotLost(f"the sandbox's server ended{self._last_words()}")
        self._line += part
        if not self._line.endswith(b"\n"):
            return None
        message = json.loads(self._line)
        self._line.clear()
        return self._through(message)

    def stop(self) -> None:
        """End the server and everything below it."""
        self._control.close()
        for descriptor in self._streams:
            os.close(descriptor)
        self._streams.clear()
        process = self._started.process
        _kill_below(process.pid)
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()
        if self._started.folder is not None:
            shutil.rmtree(self._started.folder.parent, ignore_errors=True)

    def _through(self, message: dict[str, object]) -> Reply | None:
        starting = "ready" in message
        self.ready = True
        if starting:
            return None
        for descriptor in list(self._streams):  # nobody writes any more
            while self._take(descriptor):
                continue
        ended = message.get("ended", {})
        assert isinstance(ended, dict)
        statuses = {role: (int(status), float(cpu_s)) for role, (status, cpu_s) in ended.items()}
        wall_s = time.monotonic() - self._since
        return Reply(str(message.get("why", "")), str(message.get("refused", "")), statuses, wall_s)

    def _take(self, descriptor: int) -> bool:
        """One chunk of a stream, so that one that floods does not keep the others waiting; whether there was one."""
        try:
            chunk = os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if chunk:
            self._streams[descriptor].add(chunk)
        else:
            os.close(descriptor)
            del self._streams[descriptor]
        return bool(chunk)

    def _last_words(self) -> str:
        process = self._started.process
        try:
            process.wait(1.0)
        except subprocess.TimeoutExpired:
            return ""
        text = process.stderr.read(2000).decode(errors="replace").strip() if process.stderr else ""
        return f" (status {process.returncode}): {text.splitlines()[-1]}" if text else f" (status {process.returncode})"


def _file(data: bytes) -> int:
    descriptor = os.memfd_create("job", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor


def _kill_below(pid: int) -> None:
    """The children of a bubblewrap are the first processes of namespaces that end with them."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            children = [int(child) for child in file.read().split()]
    except OSError:
        return
    for child in children:
        try:
            os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            continue
