"""Run the real engine as users do, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from grpo_engine import events
from grpo_engine.config import RunConfig


def engine_command(config: RunConfig, out: Path, *extra: str) -> list[str]:
    out.parent.mkdir(parents=True, exist_ok=True)
    path = out.parent / f"{out.name}.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return [sys.executable, "-m", "grpo_engine", "run", str(path), "--out", str(out), *extra]


def start_engine(config: RunConfig, out: Path, *extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        engine_command(config, out, *extra), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip


def run_engine(config: RunConfig, out: Path, *extra: str, seconds: float = 300) -> int:
    """Train to the end; the engine's exit status."""
    process = start_engine(config, out, *extra)
    output, _ = process.communicate(timeout=seconds)
    print(output)
    return process.returncode


def named(folder: Path, type: str) -> list[Any]:
    """Events of one type, in order."""
    return [event for event in events.read(folder) if event.type == type]


def steps_seen(folder: Path, stage: str) -> int:
    return max((event.step for event in named(folder, "trained") if event.stage == stage), default=0)


def newest_checkpoint(folder: Path) -> Path:
    return folder / str(named(folder, "checkpoint")[-1].path)
