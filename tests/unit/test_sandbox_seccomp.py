"""The system call filter, decided by a small interpreter of its program."""

from __future__ import annotations

import errno
import functools
import platform
import struct

import pytest

from grpo_engine.reward.sandbox.inside.seccomp import Filter
from grpo_engine.reward.sandbox.inside.syscalls import ALLOWED, ARCHITECTURES, SYSCALLS

ALLOW, KILL = 0x7FFF0000, 0x80000000
PID = 4711


def refused(number: int) -> int:
    return 0x00050000 | number


@functools.lru_cache
def program_of(machine: str) -> list[tuple[int, ...]]:
    """The filter of the machine that `platform` names, for the process PID."""
    made = Filter()
    program = bytearray(made._bytes)
    for at in made._own_pid_at:
        struct.pack_into("I", program, at, PID)
    return list(struct.iter_unpack("HBBI", program))


def decide(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """What the kernel would answer: classic BPF with the four instructions that the filter uses."""
    which = ARCHITECTURES[machine] if architecture is None else architecture
    given = [argument & (2**64 - 1) for argument in [*arguments, 0, 0, 0, 0, 0, 0][:6]]
    data = struct.pack("IIQ6Q", number, which, 0, *given)
    steps = program_of(machine)
    at, register = 0, 0
    while True:
        code, if_true, if_false, value = steps[at]
        at += 1
        if code == 0x20:
            (register,) = struct.unpack_from("I", data, value)
        elif code == 0x54:
            register &= value
        elif code == 0x06:
            return int(value)
        else:
            holds = register == value if code == 0x15 else bool(register & value)
            at += if_true if holds else if_false


@pytest.fixture(params=["x86_64", "aarch64"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name = str(request.param)
    monkeypatch.setattr(platform, "machine", lambda: name)
    return name


def number(machine: str, name: str) -> int:
    found = SYSCALLS[name][list(ARCHITECTURES).index(machine)]
    assert found is not None
    return found


def test_every_listed_call_is_allowed_and_every_other_is_not(machine: str) -> None:
    column = list(ARCHITECTURES).index(machine)
    allowed = {SYSCALLS[name][column] for name in ALLOWED} - {None}
    by_argument = {SYSCALLS[name][column] for name in SYSCALLS if name not in ALLOWED}
    for call in set(range(470)) - by_argument:
        assert (decide(machine, call) == ALLOW) == (call in allowed)


def test_another_architecture_ends_the_process(machine: str) -> None:
    assert decide(machine, number(machine, "read"), architecture=0x40000003) == KILL


def test_only_the_process_itself_can_be_signalled_or_asked_for_limits(machine: str) -> None:
    for name in ("kill", "tgkill"):
        call = number(machine, name)
        assert decide(machine, call, PID) == ALLOW
        assert {decide(machine, call, other) for other in (0, -1, -PID, 1, PID + 1)} == {refused(errno.EPERM)}
    limits = number(machine, "prlimit64")
    assert decide(machine, limits, 0, 7, 0, 1 << 40) == decide(machine, limits, PID, 7, 0, 8) == ALLOW
    assert decide(machine, limits, 0, 7, 1 << 40, 0) == decide(machine, limits, 1, 7, 0, 8) == refused(errno.EPERM)


def test_threads_can_be_made_and_processes_cannot(machine: str) -> None:
    assert decide(machine, number(machine, "clone"), 0x3D0F00) == ALLOW  # what glibc's pthread_create asks for
    assert decide(machine, number(machine, "clone"), 0x01200011) == refused(errno.EPERM)  # fork
    assert decide(machine, number(machine, "clone3"), 1 << 40) == refused(errno.ENOSYS)


def test_sockets_are_pairs_of_streams_that_name_no_address(machine: str) -> None:
    pair, send = number(machine, "socketpair"), number(machine, "sendto")
    assert decide(machine, pair, 1, 1 | 0o2000000) == ALLOW
    assert {decide(machine, pair, 1, 2), decide(machine, pair, 2, 1), decide(machine, pair, 1, 5)} == {
        refused(errno.EPERM)
    }
    assert decide(machine, send, 3, 1 << 40, 8, 0, 0) == ALLOW
    assert (
        decide(machine, send, 3, 1 << 40, 8, 0, 1 << 40) == decide(machine, send, 3, 0, 0, 0, 8) == refused(errno.EPERM)
    )


def test_files_without_a_name_and_odd_controls_are_refused(machine: str) -> None:
    assert decide(machine, number(machine, "openat"), -100, 8, 0o101) == ALLOW
    assert decide(machine, number(machine, "openat"), -100, 8, 0x410000) == refused(errno.EOPNOTSUPP)
    if machine == "x86_64":
        assert decide(machine, number(machine, "open"), 8, 0o101, 0x410000) == ALLOW
        assert decide(machine, number(machine, "open"), 8, 0x410000) == refused(errno.EOPNOTSUPP)
    assert decide(machine, number(machine, "fcntl"), 3, 1030) == ALLOW
    assert decide(machine, number(machine, "fcntl"), 3, 8, 1) == refused(errno.EPERM)  # F_SETOWN
    assert decide(machine, number(machine, "ioctl"), 3, 0x5401) == ALLOW
    assert decide(machine, number(machine, "ioctl"), 3, 0x5412) == refused(errno.ENOTTY)  # TIOCSTI
    assert decide(machine, number(machine, "prctl"), 4, 1) == refused(errno.EPERM)  # dumpable
