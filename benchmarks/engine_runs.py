"""Whole runs of the engine (`python -m grpo_engine run`) for benchmarks and studies, and what their journals say.

Cold starts are made once for a config and a seed, kept under `COHORT_BENCH_HOME/runs`, and forked by every arm.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from benchmarks.peers import ROOT, bench_home

Fields = dict[str, Any]
T = TypeVar("T")
DEMO = ROOT / "configs" / "demo.yaml"


@dataclass(frozen=True, slots=True)
class Run:
    """A run's folder, ended."""

    folder: Path
    status: int

    def events(self, kind: str) -> list[Fields]:
        path = self.folder / "journal.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()  # a run may be in the middle of its last line
        return [event for event in map(json.loads, lines) if event["type"] == kind]

    def series(self, name: str, stage: str = "1-rl") -> list[tuple[int, float | None]]:
        """(step, value) of a metric; None where it was not finite."""
        found = [event for event in self.events("metrics") if event["stage"] == stage and name in event["values"]]
        return [(event["step"], event["values"][name]) for event in found]

    def evaluations(self, metric: str = "accuracy_greedy", stage: str = "1-rl") -> list[tuple[int, float]]:
        found = [event for event in self.events("evaluation") if event["stage"] == stage]
        return [(event["step"], event["metrics"][metric]) for event in found if metric in event["metrics"]]

    def last_words(self) -> str:
        log = self.folder / "engine.log"
        return log.read_text(errors="replace")[-1500:] if log.exists() else "no log"


def demo_config() -> Fields:
    """configs/demo.yaml as a mapping, to be changed by the caller."""
    loaded: Fields = yaml.safe_load(DEMO.read_text())
    return loaded


def changed(config: Fields, **paths: Any) -> Fields:
    """A copy with fields set by path, `__` between names: changed(c, stages__1__num_steps=20)."""
    copy: Any = json.loads(json.dumps(config))
    for path, value in paths.items():
        *names, last = [int(name) if name.isdigit() else name for name in path.split("__")]
        place = copy
        for name in names:
            if isinstance(place, dict):
                place.setdefault(name, {})
            place = place[name]
        place[last] = value
    result: Fields = copy
    return result


def run(config: Fields, folder: Path, *, fork: Path | None = None, threads: int = 1) -> Run:
    """Train `config` into `folder` (emptied before) and wait for the end."""
    return wait(start(config, folder, fork=fork, threads=threads))


@dataclass(frozen=True, slots=True)
class Started:
    folder: Path
    process: subprocess.Popen[bytes]


def start(config: Fields, folder: Path, *, fork: Path | None = None, threads: int = 1) -> Started:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    path = folder.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "grpo_engine", "run", str(path), "--out", str(folder)]
    if fork is not None:
        command += ["--fork", str(fork)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    output = folder.with_suffix(".out").open("wb")
    with output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
    return Started(folder, process)


def wait(started: Started, until: Callable[[Run], bool] | None = None) -> Run:
    """The run at its end; `until` ends it sooner (SIGTERM, with a checkpoint) once it holds."""
    asked = False
    while (status := started.process.poll()) is None:
        if until is not None and not asked and until(Run(started.folder, 0)):
            started.process.terminate()
            asked = True
        time.sleep(0.5)
    return Run(started.folder, status)


def run_arm(config: Fields, folder: Path, fork: Path, until: Callable[[Run], bool] | None = None) -> Run:
    """One arm of a study, on one thread."""
    return wait(start(changed(config, num_threads=1), folder, fork=fork), until)


def over_seeds(study: Callable[[int], T], num_seeds: int, *, at_once: int = 2) -> list[T]:
    """`study(seed)` of every seed, `at_once` at a time, one thread each; in order of seeds."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(study, range(num_seeds)))


def cold_start(seed: int, *, config: Fields | None = None, threads: int = 1) -> Path:
    """The supervised stage of the demo (or `config`), trained once on `threads` threads; its last checkpoint.

    Raises RuntimeError with the engine's last words when it fails."""
    whole = config or demo_config()
    only = {**whole, "seed": seed, "stages": whole["stages"][:1], "name": "cold start"}
    name = hashlib.sha256(json.dumps(only, sort_keys=True).encode()).hexdigest()[:12]
    folder = bench_home() / "runs" / f"cold-{seed}-{name}"
    found = newest_checkpoint(folder)
    if found is None or not (folder / "done").exists():
        done = run({**only, "num_threads": threads}, folder, threads=threads)
        found = newest_checkpoint(folder)
        if done.status or found is None:
            raise RuntimeError(f"the cold start in {folder} ended with {done.status}: {done.last_words()}")
        (folder / "done").touch()
    return found


def newest_checkpoint(folder: Path, stage: str = "0-sft") -> Path | None:
    names = sorted(path for path in folder.glob(f"checkpoints/{stage}-*") if (path / "manifest.json").is_file())
    return names[-1] if names else None


def scratch() -> tempfile.TemporaryDirectory[str]:
    bench_home().mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(dir=bench_home())
