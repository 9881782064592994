"""What an attack is: a program that says so when it got what it must not."""

from __future__ import annotations

import platform
from dataclasses import dataclass

from grpo_engine.reward.sandbox.jobs import End

REACHED = "REACHED"
"""What a program prints when it got what it must not."""


@dataclass(frozen=True, slots=True)
class Attack:
    name: str
    body: str
    essential: bool = False
    ends: tuple[End, ...] = ()
    """How the run must end; empty: however it likes."""

    def program(self, names: dict[str, object]) -> str:
        """The source, with the decoys' names before it."""
        given = "".join(f"{name} = {value!r}\n" for name, value in (names | _numbers()).items())
        lines = "".join(f"    {line}\n" for line in self.body.strip().splitlines())
        after = f"    print({REACHED!r}, flush=True)\nexcept Exception as e:\n    print(repr(e))\n"
        return f"{_PRELUDE}{given}try:\n    {_OTHERS}\n{lines}{after}"


_PRELUDE = """import ctypes, os, socket, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def syscall(number, *arguments):
    assert libc.syscall(number, *arguments) >= 0, os.strerror(ctypes.get_errno())
def others():
    return [int(n) for n in os.listdir("/proc") if n.isdigit() and int(n) != os.getpid()]
"""

# In a namespace of its own a program may have the number of a process outside by chance.
_OTHERS = "assert os.getpid() not in (PARENT, DECOY), 'that number is its own here'"

_NUMBERS = {
    "BPF": (321, 280), "CLONE3": (435, 435), "IO_URING_SETUP": (425, 425), "KEYCTL": (250, 219), "MQ_OPEN": (240, 180),
    "OPEN_BY_HANDLE_AT": (304, 265), "PERF_EVENT_OPEN": (298, 241), "PERSONALITY": (135, 92),
    "PIDFD_SEND_SIGNAL": (424, 424), "PRCTL": (157, 167), "PROCESS_VM_READV": (310, 270), "PTRACE": (101, 117),
    "SETNS": (308, 268), "SHMGET": (29, 194), "UNSHARE": (272, 97), "USERFAULTFD": (323, 282),
}  # fmt: skip
"""System calls on x86_64 and on aarch64."""


def _numbers() -> dict[str, object]:
    column = platform.machine() != "x86_64"
    return {name: numbers[column] for name, numbers in _NUMBERS.items()}
