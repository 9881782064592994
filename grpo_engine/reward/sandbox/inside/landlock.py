"""Landlock: which files a process may touch, no TCP, no abstract socket and no signal out of its own domain."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterable

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same numbers on every machine
_RULE_PATH_BENEATH = 1
_VERSION = 1

_WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_FILE, _MAKE_REG, _TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 5, 1 << 8, 1 << 14
READ = _READ_FILE | _READ_DIR
"""Read files and list folders."""
DEVICE = _READ_FILE | _WRITE_FILE
"""What /dev/null needs."""
FLAT_FOLDER = READ | _WRITE_FILE | _REMOVE_FILE | _MAKE_REG | _TRUNCATE
"""Files of one folder: make, read, write, remove. No folders below it, no links, sockets, pipes or devices."""
_OF_FILES = _WRITE_FILE | _READ_FILE | _TRUNCATE


def version(libc: ctypes.CDLL) -> int:
    """The kernel's Landlock ABI; 0 without Landlock."""
    return max(0, int(libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)))


def ruleset(libc: ctypes.CDLL, rules: Iterable[tuple[str, int]]) -> int:
    """A descriptor of the rules (path, access), everything else denied; paths that do not exist are left out. Raises
    OSError."""
    abi = version(libc)
    handled = (1 << (13 + (abi >= 2) + (abi >= 3))) - 1 | (1 << 15 if abi >= 5 else 0)
    attributes = struct.pack("QQQ", handled, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    descriptor = int(libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(size), 0))
    if descriptor < 0:
        raise _failure("Landlock ruleset refused")
    for path, access in rules:
        _allow(libc, descriptor, path, access & handled)
    return descriptor


def restrict(libc: ctypes.CDLL, descriptor: int) -> None:
    """The calling thread and what it starts, for ever. Needs NO_NEW_PRIVS. Raises OSError."""
    if libc.syscall(_RESTRICT_SELF, descriptor, 0) != 0:
        raise _failure("Landlock restriction refused")


def _allow(libc: ctypes.CDLL, descriptor: int, path: str, access: int) -> None:
    try:
        at = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        rule = struct.pack("=Qi", access if os.path.isdir(path) else access & _OF_FILES, at)
        if libc.syscall(_ADD_RULE, descriptor, _RULE_PATH_BENEATH, rule, 0) != 0:
            raise _failure(f"Landlock rule for {path} refused")
    finally:
        os.close(at)


def _failure(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {errno.errorcode.get(number, number)}")
