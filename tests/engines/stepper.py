"""A stand-in engine: obeys its supervisor, journals and checkpoints as the real one does, and trains nothing.

    python tests/engines/stepper.py --config FILE --out DIR [--resume CHECKPOINT]

The config's `stand_in` says how: start_s, step_s, checkpoint_every, fail_at, crash_at, linger, ignore_sigterm, helper.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from grpo_engine.control import Control
from grpo_engine.errors import LeaseLost
from grpo_engine.events import Journal, boot_clock_s
from grpo_engine.manifest import Manifest, list_files, manifest_sha256, write_manifest

STAGE = "0-rl"
pause = threading.Event().wait


def main() -> int:
    control = Control.from_environment()
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    arguments = parser.parse_args()
    config = json.loads(arguments.config.read_text())
    if os.environ["RANK"] != "0":
        return follow(control)
    try:
        return lead(control, config, arguments.out, arguments.resume)
    except LeaseLost:
        return 1


def follow(control: Control) -> int:
    """A rank that does nothing but obey."""
    while not control.stop_requested:
        control.wait_until_allowed()
        pause(0.01)
    return 0


def lead(control: Control, config: dict[str, Any], out: Path, resume: Path | None) -> int:
    stand_in = config.get("stand_in", {})
    if stand_in.get("ignore_sigterm"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if stand_in.get("helper"):  # a module's process that does not mind its parent
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", str(out)], start_new_session=True)
    pause(stand_in.get("start_s", 0))
    last = config["stages"][0]["num_steps"]
    step = json.loads((resume / "state.json").read_text())["step"] if resume else 0
    control.wait_until_allowed()
    journal = Journal(out)
    journal.append("started", config_hash="0", resumed_from=str(resume) if resume else None, step=step)
    journal.append("stage_started", stage=STAGE, step=step, num_steps=last)
    while step < last and not control.stop_requested:
        step += 1
        train(control, journal, step, stand_in.get("step_s", 0.05))
        if step % stand_in.get("checkpoint_every", 5) == 0 or step == last:
            save(control, journal, out, step)
        if step == stand_in.get("crash_at"):
            os.kill(os.getpid(), signal.SIGSEGV)
        if step == stand_in.get("fail_at"):
            journal.append("failed", reason="non_finite", message="the loss stayed NaN", traceback="a\nb")
            return 1
    if control.stop_requested:
        save(control, journal, out, step)
        journal.append("stopped", step=step)
        return 0
    end_other_ranks()
    journal.append("finished", reason="finished")
    if stand_in.get("linger"):
        pause(600)
    return 0


def train(control: Control, journal: Journal, step: int, step_s: float) -> None:
    control.wait_until_allowed()
    begun = boot_clock_s()
    pause(step_s)
    ended = boot_clock_s()
    control.wait_until_allowed()
    override = [message["early_stopping"] for message in control.messages()]
    journal.metrics(step, {"reward/mean": step / 100, "messages": float(len(override))}, stage=STAGE)
    journal.append("trained", stage=STAGE, step=step, started_boot_s=begun, ended_boot_s=ended)


def save(control: Control, journal: Journal, out: Path, step: int) -> None:
    control.wait_until_allowed()
    path = f"checkpoints/{STAGE}-{step:06d}"
    folder = out / path
    if folder.exists():
        return
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"step": step}))
    about = {"stage": STAGE, "step": step, "policy_version": step, "config_hash": "0"}
    write_manifest(folder, Manifest(**about, created_at=datetime.now(UTC), files=list_files(folder)))
    journal.append("checkpoint", stage=STAGE, step=step, path=path, bytes=12, sha256=manifest_sha256(folder))


def end_other_ranks() -> None:
    """The real ranks end together because each counts the same steps; these wait for SIGTERM."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            environment = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        ours = f"COHORT_LAUNCH={os.environ['COHORT_LAUNCH']}".encode()
        if ours in environment and b"RANK=0" not in environment:
            os.kill(int(name), signal.SIGTERM)


if __name__ == "__main__":
    raise SystemExit(main())
