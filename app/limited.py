"""Commands of the engine in a child process with a time limit: the web process never runs what a user wrote.

The child lives in a session of its own, with an environment that holds none of Cohort's settings; past the limit it is
killed with all that it started.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import psutil

from app.errors import Invalid, Unavailable
from grpo_engine.errors import Problem

MAX_PRINTED_BYTES = 4 << 20
GONE_WITHIN_S = 5.0
"""Killed processes are gone by then."""
_KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "HF_HOME", "HF_HUB_CACHE", "LD_LIBRARY_PATH")
_ROOT = Path(__file__).resolve().parents[1]


def run_engine(arguments: Sequence[str], folder: Path, limit_s: float, given: str = "") -> tuple[int | None, str]:
    """`python -m grpo_engine ARGUMENTS` with `given` as its standard input: exit status (None: out of time) and the end
    of what it printed. `folder` is its home and holds its output; it must be the child's own."""
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    environment = {**kept, "HOME": str(folder), "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    (folder / "in").write_text(given)
    with open(folder / "in", "rb") as source, open(folder / "out", "w+b") as out, open(folder / "err", "w+b") as err:
        child = subprocess.Popen(
            [sys.executable, "-m", "grpo_engine", *arguments],
            cwd=_ROOT,
            env=environment,
            stdin=source,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            status: int | None = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _kill_all(child)
        printed = _tail(out) or _tail(err)
    return status, printed


def ask_engine(
    arguments: Sequence[str], folder: Path, limit_s: float, given: str = "", *, doing: str, advice: str
) -> dict[str, Any]:
    """The JSON object that the command prints. Raises Unavailable when it takes too long, or ends without one.

    `doing`: the subject of the sentence that says so, such as "The check"; `advice`: what that sentence ends with."""
    status, printed = run_engine(arguments, folder, limit_s, given)
    if status is None:
        raise Unavailable(f"{doing} took longer than {limit_s:g} s and was ended; {advice}.")
    try:
        answer = json.loads(printed)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise Unavailable(f"{doing} ended with status {status} and no answer: {printed[-500:]}")
    return answer


def raise_problems(answer: Mapping[str, Any], prefixes: Sequence[str] = ()) -> None:
    """Raises Invalid with what the engine refuses; `prefixes` are taken off the names of fields."""
    problems = [Problem(**told) for told in answer.get("problems", ())]
    for prefix in prefixes:
        problems = [replace(problem, field=problem.field.removeprefix(prefix)) for problem in problems]
    if problems:
        raise Invalid.of(problems)


def _kill_all(child: subprocess.Popen[bytes]) -> None:
    """The child's group and, since users' rewards live in groups of their own, whatever else descends from it."""
    descendants: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        descendants = psutil.Process(child.pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    for process in descendants:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    child.wait()
    psutil.wait_procs(descendants, GONE_WITHIN_S)


def _tail(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - MAX_PRINTED_BYTES))
    return file.read().decode(errors="replace").strip()
