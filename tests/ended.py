"""Processes that must end with others: one that is killed after it told an id, and whether an id is alive."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def told_before_its_kill(code: str) -> int:
    """Run `code` in a Python of its own, kill that once it has printed a process id, and return the id."""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    return pid


def is_gone(pid: int) -> bool:
    """No such process, or one that has ended and nobody asked for its status yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True
