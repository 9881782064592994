"""What must hold before a house can start; each failure is one clear sentence."""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import os
import socket
import sys
import tempfile
from pathlib import Path

ENGINE_PACKAGES = ("torch", "transformers", "safetensors", "reasoning_gym")


class LaunchFailed(Exception):
    """The house cannot start; the message is a sentence for a person."""


def check_machine(packages: tuple[str, ...] = ENGINE_PACKAGES) -> None:
    if sys.version_info[:2] != (3, 11):
        raise LaunchFailed(f"Cohort needs Python 3.11, but this is {sys.version.split()[0]}.")
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        names = ", ".join(missing)
        raise LaunchFailed(f"The worker needs the engine's packages, but {names} is missing: run `make install`.")


def free_port_or_fail(host: str, port: int) -> None:
    """Raises LaunchFailed when `host:port` cannot be bound."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LaunchFailed(
                f"Port {port} on {host} is taken: stop what uses it, or choose another with COHORT_PORT={port + 1}."
            ) from error
        raise LaunchFailed(
            f"Cannot listen on {host}:{port} ({error.strerror}): correct COHORT_HOST or COHORT_PORT."
        ) from error


class HomeLock:
    """Held by the one launcher that serves a home; the system frees it when the launcher ends."""

    def __init__(self, home: Path, url: str) -> None:
        """Raises LaunchFailed when the home cannot be written or another launcher serves it."""
        try:
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=home):
                pass
            self._file = open(home / "launcher.lock", "a+")  # noqa: SIM115 - held as long as the house stands
        except OSError as error:
            raise LaunchFailed(
                f"Cannot write to the home {home} ({error.strerror}): set COHORT_HOME to a folder of yours."
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.seek(0)
            owner = self._file.read().strip() or "another launcher"
            self._file.close()
            raise LaunchFailed(
                f"The home {home} is already served by {owner}: use that one, or stop it first."
            ) from error
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} at {url}")
        self._file.flush()

    def release(self) -> None:
        self._file.truncate(0)
        self._file.close()
