"""A private PostgreSQL for tests: data under /tmp, a unix socket only, durability off."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

SERVER_USER = "nobody"
"""PostgreSQL refuses to run as root; the tests may well do."""


def find_binary(name: str) -> str:
    """Path of a PostgreSQL program: on the PATH, else Debian's newest."""
    found = shutil.which(name)
    installed = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    if found is None and not installed:
        raise FileNotFoundError(f"{name} is not installed; the tests need PostgreSQL's server programs")
    return found or str(installed[-1])


class PostgresServer:
    """Started on creation; `stop` ends it and removes its files."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="cohort-pg-", dir="/tmp"))
        self.user = SERVER_USER if os.getuid() == 0 else pwd.getpwuid(os.getuid()).pw_name
        if os.getuid() == 0:
            shutil.chown(self.folder, SERVER_USER)
        self.data = self.folder / "data"
        self._run([find_binary("initdb"), "-D", str(self.data), "-U", "cohort", "-A", "trust", "-N", "-E", "UTF8"])
        options = (
            f"-k {self.folder} -c listen_addresses='' -c fsync=off -c synchronous_commit=off -c full_page_writes=off"
        )
        log = str(self.folder / "log")
        self._run([find_binary("pg_ctl"), "-D", str(self.data), "-l", log, "-o", options, "-w", "start"])
        self._databases = 0

    def url(self, name: str) -> str:
        return f"postgresql+psycopg://cohort@/{name}?host={self.folder}"

    def create(self, template: str = "template1") -> str:
        """Name of a new database, a copy of `template`."""
        self._databases += 1
        name = f"cohort_{self._databases}"
        self._run([find_binary("createdb"), "-h", str(self.folder), "-U", "cohort", "-T", template, name])
        return name

    def restart(self) -> None:
        """Every session is cut off, as by a crash."""
        log = str(self.folder / "log")
        self._run([find_binary("pg_ctl"), "-D", str(self.data), "-l", log, "-m", "immediate", "-w", "restart"])

    def stop(self) -> None:
        self._run([find_binary("pg_ctl"), "-D", str(self.data), "-m", "immediate", "-w", "stop"])
        shutil.rmtree(self.folder)

    def _run(self, command: Sequence[str]) -> None:
        if os.getuid() == 0:
            command = [
                "setpriv",
                f"--reuid={SERVER_USER}",
                f"--regid={pwd.getpwnam(SERVER_USER).pw_gid}",
                "--clear-groups",
                *command,
            ]
        done = subprocess.run(
            command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout.decode(errors='replace')}"
