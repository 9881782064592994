"""Checks of a config before launch, in a child process with a time limit: the web process never runs what a user wrote.

The child is `python -m grpo_engine preflight --json` in a session of its own, with an environment that holds none of
Cohort's settings; past the limit its whole group is killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from app.errors import Unavailable
from app.rewards.service import custom_names
from app.settings import Settings
from grpo_engine.config import RunConfig

MAX_REPORT_BYTES = 4 << 20
_KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "HF_HOME", "HF_HUB_CACHE", "LD_LIBRARY_PATH")
_ROOT = Path(__file__).resolve().parents[2]


def check(settings: Settings, config: RunConfig, sources: Mapping[str, str]) -> dict[str, Any]:
    """The preflight's report as JSON: problems, warnings, prompts, gold_rewards, memory, seconds.

    `sources`: custom reward name -> source text; those left out are reported as not called. Raises Unavailable when
    the child exceeds the limit or dies."""
    with tempfile.TemporaryDirectory(prefix="cohort-check-") as name:
        folder = Path(name)
        command = _command(folder, config, sources)
        status, report = _run_limited(command, folder, settings.preflight_limit_s)
    if status is None:
        raise Unavailable(
            f"The check took longer than {settings.preflight_limit_s:g} s and was ended; "
            "a custom reward that never returns is the usual cause."
        )
    try:
        answer: dict[str, Any] = json.loads(report)
    except ValueError as error:
        raise Unavailable(f"The check ended with status {status} and no report: {report[-500:]}") from error
    return answer


def _command(folder: Path, config: RunConfig, sources: Mapping[str, str]) -> list[str]:
    (folder / "config.yaml").write_text(config.canonical_json())  # JSON is YAML
    command = [sys.executable, "-m", "grpo_engine", "preflight", str(folder / "config.yaml"), "--json"]
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
        command += ["--reward", f"{name}={folder / name}.py"]
    for name in sorted(custom_names(config).keys() - sources.keys()):
        command += ["--uncalled", name]
    return command


def _run_limited(command: list[str], folder: Path, limit_s: float) -> tuple[int | None, str]:
    """Exit status (None: out of time) and the end of what was printed."""
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    environment = {**kept, "HOME": str(folder), "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    with open(folder / "out", "w+b") as out, open(folder / "err", "w+b") as err:
        child = subprocess.Popen(
            command,
            cwd=_ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            status: int | None = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _kill_group(child)
        printed = _tail(out) or _tail(err)
    return status, printed


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _tail(file: Any) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - MAX_REPORT_BYTES))
    text: str = file.read().decode(errors="replace").strip()
    return text
