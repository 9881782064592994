"""One measurement is one process that runs alone; two sides alternate, so that a machine that warms up, or a
neighbour, meets both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.peers import ROOT, trl_python

Job = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison: how its process is called, and the settings to try for its fastest."""

    name: str
    command: Sequence[str]
    job: Job
    choices: Mapping[str, Sequence[Any]]
    """Settings to choose from for the fastest step: each setting in turn, the others at their best so far."""


def ours(job: Job, choices: Mapping[str, Sequence[Any]]) -> Side:
    return Side("ours", [sys.executable, "-m", "benchmarks.our_update"], job, choices)


def trl(job: Job, choices: Mapping[str, Sequence[Any]]) -> Side:
    script = str(Path(__file__).with_name("trl_update.py"))
    # -P: the script's folder holds names such as `memory`, which no library may import by accident.
    return Side("TRL", [str(trl_python()), "-P", script], job, choices)


def run_job(side: Side, settings: Job) -> dict[str, Any]:
    """Run one process to its end and return what it wrote. Raises RuntimeError with its last words."""
    job = {**side.job, **settings}
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "job.json", Path(folder) / "out.json"
        path.write_text(json.dumps({**job, "out": str(out)}))
        threads = str(job.get("threads", 1))
        environment = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        done = subprocess.run([*side.command, str(path)], env=environment, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{side.name} {settings} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def fastest(side: Side) -> Job:
    """The settings with the shortest step, each tried once (after a warm-up step inside its process)."""
    best: Job = {name: values[0] for name, values in side.choices.items()}
    tried: dict[str, float] = {}
    for name, values in side.choices.items():
        for value in values:
            candidate = {**best, name: value}
            if (key := json.dumps(candidate)) not in tried:
                result = run_job(side, {**candidate, "repetitions": 1, "gradients": None})
                tried[key] = min(result["seconds"])
                peak = result["memory"]["peak"] / 1e9
                print(f"  {side.name} {candidate}: {tried[key]:.3f} s a step, peak {peak:.2f} GB", flush=True)
        best[name] = min(values, key=lambda value: tried[json.dumps({**best, name: value})])
    return best


def alternate(sides: Sequence[Side], settings: Sequence[Job], rounds: int) -> list[list[dict[str, Any]]]:
    """A B A B …: `rounds` processes of each side; one list of results a side."""
    results: list[list[dict[str, Any]]] = [[] for _ in sides]
    for _ in range(rounds):
        for index, side in enumerate(sides):
            results[index].append(run_job(side, settings[index]))
    return results


def in_process(function: str, arguments: Mapping[str, Any], *, threads: int = 1) -> Any:
    """Call `module:function(**arguments)` in a fresh interpreter and return its JSON result: clean memory peaks."""
    module, name = function.split(":")
    code = (
        "import importlib, json, sys, torch; torch.set_num_threads(int(sys.argv[4]));"
        "f = getattr(importlib.import_module(sys.argv[1]), sys.argv[2]);"
        "print('\\n' + json.dumps(f(**json.loads(sys.argv[3]))))"
    )
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-c", code, module, name, json.dumps(dict(arguments)), str(threads)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{function} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def relative_difference(first: Path, second: Path) -> float:
    """L2 norm of the difference of two gradient files over the norm of the second; both must hold the same tensors."""
    a, b = (_gradients(file) for file in (first, second))
    if set(a) != set(b):
        raise ValueError(f"{first} and {second} hold different gradients: {sorted(set(a) ^ set(b))[:4]}")
    difference = torch.stack([(a[name] - b[name]).square().sum() for name in a]).sum().sqrt()
    return float(difference / torch.stack([tensor.square().sum() for tensor in b.values()]).sum().sqrt())


def _gradients(file: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.double() for name, tensor in load_file(file).items() if name.startswith("gradient/")}
