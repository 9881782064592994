"""Environments of the peers that Cohort is measured against, each apart from Cohort's own.

`COHORT_TRL_VENV` names a ready one; otherwise it is made once under `COHORT_BENCH_HOME` (default `var/bench`), about
two minutes. A stamp holds the requirements it was made from, so changed pins make it anew.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = Path(__file__).with_name("trl-requirements.txt")
STAMP = ".requirements"


class PeerMissing(Exception):
    """The peer's environment cannot be made or does not work."""


def bench_home() -> Path:
    """Folder of environments, model folders and batches that benchmarks make."""
    return Path(os.environ.get("COHORT_BENCH_HOME") or ROOT / "var" / "bench")


def trl_python() -> Path:
    """The interpreter of TRL's environment, made when it is not there.

    Raises PeerMissing with what failed and what to do."""
    ready = os.environ.get("COHORT_TRL_VENV")
    if ready:
        python = Path(ready) / "bin" / "python"
        if not python.exists():
            raise PeerMissing(f"COHORT_TRL_VENV={ready}: has no bin/python; name a virtual environment that holds TRL")
        return python
    folder = bench_home() / "trl" / "venv"
    if not _is_current(folder, REQUIREMENTS.read_text()):
        _make(folder, REQUIREMENTS)
    return folder / "bin" / "python"


def _is_current(folder: Path, requirements: str) -> bool:
    stamp = folder / STAMP
    return stamp.is_file() and stamp.read_text() == requirements


def _make(folder: Path, requirements: Path) -> None:
    """A fresh environment. torch goes first, alone, so that it is the build this machine's pip is set up for."""
    print(f"Making the peer's environment in {folder} (once, about two minutes) ...", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    python = str(folder / "bin" / "python")
    torch = next(line for line in requirements.read_text().splitlines() if line.startswith("torch=="))
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [*pip, torch],
        [*pip, "-r", str(requirements)],
    ):
        _run(command, folder)
    (folder / STAMP).write_text(requirements.read_text())


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise PeerMissing(
            f"{' '.join(command)} ended with status {done.returncode}: {done.stdout.strip()[-800:]}; "
            f"repair it, or set COHORT_TRL_VENV to an environment with {REQUIREMENTS.name} (here: {folder})"
        )
