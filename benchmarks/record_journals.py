"""Record the journals that the detectors are tested on: ten healthy runs and one failing run for each detector.

    python -m benchmarks.record_journals --work DIR        # about twenty minutes on two cores

All start from the demo's cold start (SFT, seed 0). Only what detectors read is kept. Labels are written from how a run
was set up; where the onset lies in the run itself (entropy, truncation, non-finite) it is the first step at which the
recorded numbers cross the default threshold for good, which this script prints for a person to check.
"""

from __future__ import annotations

import argparse
import gzip
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from grpo_engine import events

TARGET = Path("tests/data/journals")
HEALTHY_SEEDS = range(10)
KEPT_PREFIXES = ("reward/", "policy/", "completion/", "groups/", "optimizer/", "sampler/", "loss")

CONSTANT = "def reward(completions, **columns):\n    return [1.0] * len(completions)\n"
LONG = "def reward(completions, **columns):\n    return [len(text) / 56 for text in completions]\n"
FIRST_DIGIT = (
    "def reward(completions, **columns):\n"
    "    return [float(text.startswith('<think></think>')) + text.count('1') / 10 for text in completions]\n"
)

EXPONENTIAL = "def reward(completions, **columns):\n    return [10.0 ** len(text) for text in completions]\n"

FAILING: dict[str, dict[str, Any]] = {
    # Rewards of any size, not divided by their deviation: the gradient's norm overflows.
    "non_finite": {
        "reward": EXPONENTIAL,
        "stage": {"advantage": {"kind": "dr_grpo"}},
        "optimizer": {"max_skipped_steps": 20},
    },
    "zero_variance": {"reward": CONSTANT},
    "entropy_collapse": {"reward": FIRST_DIGIT, "optimizer": {"learning_rate": 2e-3, "warmup_steps": 0}},
    "truncation": {"reward": LONG, "optimizer": {"learning_rate": 5e-4}},
    "flat_reward": {"optimizer": {"learning_rate": 1e-9}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for the runs; a finished run is not repeated")
    parser.add_argument("--only", help="record only names that contain this")
    arguments = parser.parse_args()
    demo = yaml.safe_load(Path("configs/demo.yaml").read_text())
    cold = train(arguments.work / "cold-start", {**demo, "stages": demo["stages"][:1]}) / "checkpoints/0-sft-000500"
    TARGET.mkdir(parents=True, exist_ok=True)
    plans = {f"healthy-demo-{seed}": ({"seed": seed}, None) for seed in HEALTHY_SEEDS}
    plans |= {f"failing-{name}": (changes, changes.get("reward")) for name, changes in FAILING.items()}
    for name, (changes, reward) in plans.items():
        if arguments.only is None or arguments.only in name:
            folder = train(arguments.work / name, rl_config(demo, cold, changes, reward), reward)
            keep(folder, TARGET / f"{name}.jsonl.gz")


def rl_config(demo: dict[str, Any], cold: Path, changes: dict[str, Any], reward: str | None) -> dict[str, Any]:
    """The demo's RL stage from the cold start, with the changes of one run."""
    stage = {**demo["stages"][1], **changes.get("stage", {}), "num_steps": 45, "early_stopping": {"mode": "observe"}}
    stage["optimizer"] = {**stage["optimizer"], **changes.get("optimizer", {})}
    if reward is not None:
        stage["rewards"] = [{"kind": "custom", "name": "recorded"}]
    return {
        **demo, "name": "recorded journal", "seed": changes.get("seed", 0), "stages": [stage],
        "model": {"source": "folder", "path": str(cold)},
    }  # fmt: skip


def train(folder: Path, config: dict[str, Any], reward: str | None = None) -> Path:
    """Run the engine unless the folder holds a run that ended."""
    if folder.exists() and any(event.type in ("finished", "failed") for event in events.read(folder)):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "grpo_engine", "run", str(path), "--out", str(folder)]
    if reward is not None:
        source = folder.with_suffix(".py")
        source.write_text(reward)
        command += ["--reward", f"recorded={source}"]
    subprocess.run(command, check=False)  # a failing run may end with a failure
    return folder


def keep(folder: Path, target: Path) -> None:
    """Metrics lines with what detectors read, six digits each, compressed without a time stamp."""
    lines = []
    for event in events.read(folder):
        if isinstance(event, events.Metrics):
            values = {
                name: value if value is None else float(f"{value:.6g}")
                for name, value in event.values.items()
                if name.startswith(KEPT_PREFIXES)
            }
            kinds = {name: kind for name, kind in event.nonfinite.items() if name in values}
            slim = event.model_copy(update={"values": values, "nonfinite": kinds})
            lines.append(slim.model_dump_json())
    target.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode(), mtime=0))
    print(f"{target.name}: {len(lines)} steps, {target.stat().st_size} bytes")
    print_crossings(folder)


def print_crossings(folder: Path) -> None:
    """First steps at which what a detector watches crosses its default threshold for good."""
    metrics = [event for event in events.read(folder) if isinstance(event, events.Metrics)]
    tests = {
        "non-finite": lambda e: bool(e.nonfinite) or bool(e.values.get("optimizer/skipped_steps")),
        "truncated >= 0.5": lambda e: (e.values["completion/truncated_share"] or 0) >= 0.5,
        "entropy < 0.01": lambda e: (e.values.get("policy/entropy") or 1) < 0.01,
        "zero variance >= 0.75": lambda e: (e.values["groups/zero_variance_share"] or 0) >= 0.75,
    }
    for name, crossed in tests.items():
        flags = [crossed(event) for event in metrics]
        if any(flags):
            last_good = max((index for index, flag in enumerate(flags) if not flag), default=-1)
            print(f"    {name}: first {metrics[flags.index(True)].step}, for good after step {last_good + 1}")


if __name__ == "__main__":
    main()
