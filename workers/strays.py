"""What an engine leaves behind when its supervisor is killed comes to the worker's main process, a subreaper."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

from grpo_engine.launch import LAUNCH_ID, process_table

log = logging.getLogger("cohort.worker")


def end_strays() -> int:
    """SIGKILL to children of this process that an engine started, and collect the dead; how many were killed.

    The worker's own (Celery) children share its session and carry no launch id; they are never touched.
    """
    count = 0
    for pid, (parent, state) in process_table().items():
        if parent != os.getpid():
            continue
        if state == "Z" and _in_another_session(pid):
            os.waitpid(pid, os.WNOHANG)
        elif state not in "ZX" and _is_of_an_engine(pid):
            log.warning("process %d outlived its engine's supervisor and is killed", pid)
            os.kill(pid, signal.SIGKILL)
            count += 1
    return count


def _in_another_session(pid: int) -> bool:
    try:
        return os.getsid(pid) != os.getsid(0)
    except ProcessLookupError:
        return False


def _is_of_an_engine(pid: int) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return any(entry.startswith(f"{LAUNCH_ID}=".encode()) for entry in environment.split(b"\0"))
