"""What a rank is told while it trains: may it go on, should it stop, what the operator wants. Torch-free.

Whoever started the rank holds the other end of a pipe and writes one JSON object a line:
`{"deadline_boot_s": 812.5}` (CLOCK_BOOTTIME; no step and no write after it), `{"lost": true}`, or an operator's message
such as `{"early_stopping": "stop"}` (null: as the config says). A rank started by hand has no pipe and may do
everything.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
from types import FrameType
from typing import TYPE_CHECKING, Any

from grpo_engine.errors import LeaseLost
from grpo_engine.events import boot_clock_s
from grpo_engine.lifeline import die_with_parent

if TYPE_CHECKING:
    from grpo_engine.protocols import Communicator

PARENT_PID = "COHORT_PARENT_PID"
CONTROL_FD = "COHORT_CONTROL_FD"
FIRST_DEADLINE = "COHORT_DEADLINE_BOOT_S"
"""Deadline at the start, so that a rank whose supervisor freezes before its first message waits; unset = none."""

_WAIT_S = 1.0


class Control:
    """A rank's view of its supervisor. Use it from one thread."""

    def __init__(self, descriptor: int | None = None, deadline_boot_s: float = math.inf) -> None:
        self.stop_requested = False
        """True after SIGTERM or SIGINT: write a checkpoint and end."""
        self._descriptor = descriptor
        self._deadline_boot_s = deadline_boot_s
        self._lost = False
        self._torn = b""
        self._messages: list[dict[str, Any]] = []

    @classmethod
    def from_environment(cls) -> Control:
        """A rank's first act, in its main thread: die with the parent, mind SIGTERM and SIGINT, open the pipe.

        Raises SystemExit when the parent has already gone.
        """
        parent = os.environ.get(PARENT_PID)
        if parent is not None:
            die_with_parent(int(parent))
        descriptor = os.environ.get(CONTROL_FD)
        control = cls(
            int(descriptor) if descriptor is not None else None, float(os.environ.get(FIRST_DEADLINE, math.inf))
        )
        signal.signal(signal.SIGTERM, control._request_stop)
        signal.signal(signal.SIGINT, control._request_stop)
        return control

    def wait_until_allowed(self) -> None:
        """Call before each optimizer step and each write: returns at once before the deadline, blocks past it.

        Raises LeaseLost when the run belongs to another attempt or the supervisor has gone.
        """
        self._receive(0)
        while not self._lost and boot_clock_s() >= self._deadline_boot_s:
            self._receive(_WAIT_S)
        if self._lost:
            raise LeaseLost("the supervisor has gone or lost the run; another attempt may be training it")

    def messages(self) -> list[dict[str, Any]]:
        """The operator's messages so far, oldest first."""
        self._receive(0)
        return list(self._messages)

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        self.stop_requested = True

    def _receive(self, timeout_s: float) -> None:
        if self._descriptor is None or self._lost:
            return
        poller = select.poll()
        poller.register(self._descriptor, select.POLLIN)
        while poller.poll(timeout_s * 1000):
            data = os.read(self._descriptor, 65536)
            if not data:
                self._lost = True
                return
            *lines, self._torn = (self._torn + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
            timeout_s = 0

    def _take(self, message: dict[str, Any]) -> None:
        if message.get("lost"):
            self._lost = True
        elif "deadline_boot_s" in message:
            self._deadline_boot_s = float(message["deadline_boot_s"])
        else:
            self._messages.append(message)


class SharedControl:
    """Control of several ranks: all see rank 0's stop and messages, so all leave a loop at the same step."""

    def __init__(self, control: Control, communicator: Communicator) -> None:
        self.stop_requested = False
        """As of the last `synchronise`."""
        self._own = control
        self._communicator = communicator
        self._messages: list[dict[str, Any]] = []

    def synchronise(self) -> None:
        """Take over what rank 0 has been told. Collective; once a turn of a loop."""
        told = (self._own.stop_requested, self._own.messages())
        self.stop_requested, self._messages = self._communicator.from_first(told)

    def messages(self) -> list[dict[str, Any]]:
        """The operator's messages up to the last `synchronise`, oldest first."""
        return list(self._messages)

    def wait_until_allowed(self) -> None:
        """Each rank by its own pipe: as Control's."""
        self._own.wait_until_allowed()
