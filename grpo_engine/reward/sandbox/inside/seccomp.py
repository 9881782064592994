"""The system calls a program may make: a list of what Python needs, everything else is refused.

No process, no socket that leads anywhere, no signal to another, no change of owner, mode or time, no namespace, no
tracing, no kernel interface beyond files, memory, threads, clocks and pipes. Refused calls fail with EPERM (ENOSYS for
clone3, so that libraries fall back to clone, whose flags can be read here).
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

from .syscalls import ALLOWED, ARCHITECTURES, SYSCALLS

_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # BPF: ld word, jeq, jset, ret
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16  # struct seccomp_data

_CLONE_THREAD = 0x10000
_SAME_PROCESS = 0xFFFFFFFE  # placeholder of the process's own id
_O_TMPFILE = 0x400000
_PRCTL = (15, 16, 0x53564D41)  # SET_NAME, GET_NAME, SET_VMA: names of threads and of memory
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)  # duplicate, flags, locks, pipe size; no owner, no signal

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2

_Instruction = tuple[int, int, int, int]


def supported() -> bool:
    """Whether this machine's system call numbers are known."""
    return platform.machine() in ARCHITECTURES


class Filter:
    """The program, built once; `install` puts the calling process's id in and gives it to the kernel."""

    def __init__(self) -> None:
        machine = platform.machine()
        if machine not in ARCHITECTURES:
            raise OSError(errno.ENOSYS, f"no table of system calls for {machine!r}: use x86_64 or aarch64")
        program = _program(ARCHITECTURES[machine], list(ARCHITECTURES).index(machine))
        self._own_pid_at = [8 * at + 4 for at, instruction in enumerate(program) if instruction[3] == _SAME_PROCESS]
        self._bytes = b"".join(struct.pack("HBBI", *instruction) for instruction in program)

    def install(self, libc: ctypes.CDLL, pid: int) -> None:
        """For the calling thread and what it starts, for ever. Needs NO_NEW_PRIVS. Raises OSError."""
        code = ctypes.create_string_buffer(self._bytes, len(self._bytes))
        for at in self._own_pid_at:
            struct.pack_into("I", code, at, pid)
        header = struct.pack("HxxxxxxQ", len(self._bytes) // 8, ctypes.addressof(code))
        if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"seccomp filter refused: {errno.errorcode.get(number, number)}")


def _program(architecture: int, column: int) -> list[_Instruction]:
    refuse = _refuse(errno.EPERM)
    program = [_load(_ARCHITECTURE_AT), (_EQUAL, 1, 0, architecture), _return(_KILL_PROCESS), _load(_NUMBER_AT)]
    for name in ALLOWED:
        number = SYSCALLS[name][column]
        if number is not None:
            program += [(_EQUAL, 0, 1, number), _return(_ALLOW)]
    for name, rule in _rules().items():
        number = SYSCALLS[name][column]
        if number is not None:
            program += [(_EQUAL, 0, len(rule), number), *rule]
    return [*program, refuse]


def _rules() -> dict[str, list[_Instruction]]:
    """Calls of which an argument decides; each ends in a return."""
    only_own = [*_argument_is(0, (_SAME_PROCESS,)), _refuse(errno.EPERM)]
    no_new_limit = [_load_high(2), (_EQUAL, 0, 3, 0), _load_low(2), (_EQUAL, 0, 1, 0), _return(_ALLOW)]
    no_address = [_load_high(4), (_EQUAL, 0, 3, 0), _load_low(4), (_EQUAL, 0, 1, 0), _return(_ALLOW)]
    thread = [_load_low(0), (_ANY_BIT, 0, 1, _CLONE_THREAD), _return(_ALLOW), _refuse(errno.EPERM)]
    stream_pair = [_load_low(0), (_EQUAL, 0, 4, 1), _load_low(1), (0x54, 0, 0, 0xF), (_EQUAL, 0, 1, 1), _return(_ALLOW)]
    return {
        "kill": only_own,
        "tgkill": only_own,
        "clone": thread,
        "clone3": [_refuse(errno.ENOSYS)],
        "prctl": [*_argument_is(0, _PRCTL), _refuse(errno.EPERM)],
        "ioctl": [*_argument_is(1, _IOCTL), _refuse(errno.ENOTTY)],
        "fcntl": [*_argument_is(1, _FCNTL), _refuse(errno.EPERM)],
        "prlimit64": [*_argument_is_not(0, (0, _SAME_PROCESS)), *no_new_limit, _refuse(errno.EPERM)],
        "socketpair": [*stream_pair, _refuse(errno.EPERM)],
        "sendto": [*no_address, _refuse(errno.EPERM)],
        "open": [*_without_bit(1, _O_TMPFILE), _refuse(errno.EOPNOTSUPP)],
        "openat": [*_without_bit(2, _O_TMPFILE), _refuse(errno.EOPNOTSUPP)],
    }


def _argument_is(index: int, values: tuple[int, ...]) -> list[_Instruction]:
    """Allow when the lower half of an int argument is one of the values, else go on."""
    steps = [_load_low(index)]
    for value in values:
        steps += [(_EQUAL, 0, 1, value), _return(_ALLOW)]
    return steps


def _argument_is_not(index: int, values: tuple[int, ...]) -> list[_Instruction]:
    """Refuse unless the argument is one of the values, else go on."""
    jumps = [(_EQUAL, len(values) - at, 0, value) for at, value in enumerate(values)]
    return [_load_low(index), *jumps, _refuse(errno.EPERM)]


def _without_bit(index: int, bit: int) -> list[_Instruction]:
    return [_load_low(index), (_ANY_BIT, 1, 0, bit), _return(_ALLOW)]


def _load(at: int) -> _Instruction:
    return (_LOAD, 0, 0, at)


def _load_low(index: int) -> _Instruction:
    return _load(_ARGUMENTS_AT + 8 * index)


def _load_high(index: int) -> _Instruction:
    return _load(_ARGUMENTS_AT + 8 * index + 4)


def _return(action: int) -> _Instruction:
    return (_RETURN, 0, 0, action)


def _refuse(number: int) -> _Instruction:
    return _return(_ERRNO | number)
