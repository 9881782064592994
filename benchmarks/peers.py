"""Environments of the peers that Cohort is measured against, each apart from Cohort's own.

`COHORT_TRL_VENV` and `COHORT_VLLM_VENV` name ready ones; otherwise they are made once under `COHORT_BENCH_HOME`
(default `var/bench`), about two minutes for TRL and four for vLLM. A stamp holds what an environment was made from, so
changed pins make it anew.
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
    if (ready := _ready("COHORT_TRL_VENV", "TRL")) is not None:
        return ready
    folder = bench_home() / "trl" / "venv"
    if not _is_current(folder, REQUIREMENTS.read_text()):
        _make(folder, REQUIREMENTS)
    return folder / "bin" / "python"


def vllm_python() -> Path:
    """The interpreter of an environment with vLLM and Cohort's own requirements, made by `make install-vllm`.

    Raises PeerMissing with what failed and what to do."""
    if (ready := _ready("COHORT_VLLM_VENV", "vLLM and Cohort's requirements")) is not None:
        return ready
    folder = bench_home() / "vllm" / "venv"
    made_from = "".join((ROOT / name).read_text() for name in ("pyproject.toml", "constraints.txt", "Makefile"))
    if not _is_current(folder, made_from):
        print(f"Making vLLM's environment in {folder} (once, about four minutes) ...", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        remedy = "repair it, or set COHORT_VLLM_VENV to an environment that `make install-vllm VENV=...` made"
        _run(["make", "-C", str(ROOT), "install-vllm", f"VENV={folder}"], remedy)
        (folder / STAMP).write_text(made_from)
    return folder / "bin" / "python"


def _ready(variable: str, holds: str) -> Path | None:
    """The interpreter that an environment variable's folder has; None where it is not set."""
    folder = os.environ.get(variable)
    if not folder:
        return None
    python = Path(folder) / "bin" / "python"
    if not python.exists():
        raise PeerMissing(f"{variable}={folder}: has no bin/python; name a virtual environment that holds {holds}")
    return python


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
        _run(command, f"repair it, or set COHORT_TRL_VENV to an environment with {requirements.name} (here: {folder})")
    (folder / STAMP).write_text(requirements.read_text())


def _run(command: list[str], remedy: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        told = done.stdout.strip()[-800:]
        raise PeerMissing(f"{' '.join(command)} ended with status {done.returncode}: {told}; {remedy}")
