"""Resume is exact: however a run is interrupted, its weights end bit for bit as if it had not been."""

import hashlib
import os
import shutil
import signal
from pathlib import Path

import pytest

from grpo_engine import events
from tests.engine_configs import rl_stage, sft_stage, tiny_config
from tests.engine_process import named, newest_checkpoint, run_engine, start_engine, steps_seen
from tests.waiting import wait_until

pytestmark = pytest.mark.xdist_group("resume")

STAGES = (
    sft_stage(num_steps=6),
    rl_stage(num_steps=20, kl={"weight": 0.01}, checkpoint={"every_steps": 7, "keep_last": 5}),
)


TIMED = ("time/", "throughput/", "memory/", "rollout/sync_s", "rollout/draft_gain")
"""Metrics of two equal runs that differ."""


def weights_hash(folder):
    return hashlib.sha256((newest_checkpoint(folder) / "model.safetensors").read_bytes()).hexdigest()


def journaled(folder):
    """What the run learned, by step: metrics that do not measure time or memory, and early-stopping state."""
    found = {}
    for event in events.read(folder):
        if event.type == "metrics":
            kept = {k: v for k, v in event.values.items() if not k.startswith(TIMED)}
            found[event.stage, event.step, "metrics"] = kept
        elif event.type == "early_stopping":
            found[event.stage, event.step, "early"] = event.model_dump(exclude={"seq", "time"})
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume") / "whole"
    assert run_engine(tiny_config(*STAGES), folder) == 0
    return folder


def has_checkpoint(folder, step):
    return any(event.stage == "1-rl" and event.step == step for event in named(folder, "checkpoint"))


def interrupt(folder, number, step):
    process = start_engine(tiny_config(*STAGES), folder)
    ready = has_checkpoint if number == signal.SIGKILL else lambda folder, step: steps_seen(folder, "1-rl") >= step
    wait_until(lambda: ready(folder, step), 120, f"step {step}")
    target = process.pid
    if number == signal.SIGKILL:  # the rank itself, not the command that watches it
        [target] = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
    signal.pidfd_send_signal(os.pidfd_open(target), number)
    process.communicate(timeout=120)
    return process.returncode


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
def test_an_interrupted_run_ends_with_the_same_weights(whole, tmp_path, number):
    first, second = tmp_path / "first", tmp_path / "second"
    status = interrupt(first, number, step=7)
    assert (status == 0) == (number != signal.SIGKILL)
    resumed_at = named(first, "checkpoint")[-1].step
    assert 7 <= resumed_at < 20
    assert run_engine(tiny_config(*STAGES), second, "--resume", str(newest_checkpoint(first))) == 0
    assert steps_seen(second, "1-rl") == 20
    assert weights_hash(second) == weights_hash(whole)
    expected = {key: value for key, value in journaled(whole).items() if key[0] == "1-rl" and key[1] > resumed_at}
    assert journaled(second) == expected


def test_a_reward_that_draws_random_numbers_goes_on_in_their_sequence(tmp_path):
    source = tmp_path / "dice.py"
    source.write_text("import random\n\ndef reward(completions):\n    return [random.random() for _ in completions]\n")
    dice = {"kind": "custom", "name": "dice"}
    config = tiny_config(rl_stage(rewards=[dice], num_steps=4, checkpoint={"every_steps": 2}))
    first, second = tmp_path / "first", tmp_path / "second"
    assert run_engine(config, first, "--reward", f"dice={source}") == 0
    checkpoint = first / "checkpoints" / "0-rl-000002"
    assert run_engine(config, second, "--reward", f"dice={source}", "--resume", str(checkpoint)) == 0
    assert journaled(second) == {key: value for key, value in journaled(first).items() if key[1] > 2}
    assert weights_hash(second) == weights_hash(first)


def test_a_checkpoint_of_another_config_is_refused(whole, tmp_path):
    other = tiny_config(*STAGES, seed=1)
    assert run_engine(other, tmp_path / "run", "--resume", str(newest_checkpoint(whole))) == 1
    [failure] = named(tmp_path / "run", "failed")
    assert failure.reason == "checkpoint_invalid"


def test_a_damaged_checkpoint_is_refused(whole, tmp_path):
    copy = tmp_path / "checkpoint"
    shutil.copytree(newest_checkpoint(whole), copy)
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert run_engine(tiny_config(*STAGES), tmp_path / "run", "--resume", str(copy)) == 1
    [failure] = named(tmp_path / "run", "failed")
    assert "model.safetensors" in failure.message


def test_a_fork_goes_on_from_the_checkpoint_under_other_settings(whole, tmp_path):
    early_stopping = {"warmup_steps": 0}
    longer = rl_stage(num_steps=24, kl={"weight": 0.02}, checkpoint={"every_steps": 7}, early_stopping=early_stopping)
    config = tiny_config(STAGES[0], longer)
    assert run_engine(config, tmp_path / "fork", "--fork", str(newest_checkpoint(whole))) == 0
    started = named(tmp_path / "fork", "started")[0]
    assert (started.stage_index, started.step) == (1, 20)
    assert [event.step for event in named(tmp_path / "fork", "trained")] == [21, 22, 23, 24]
    assert named(tmp_path / "fork", "early_stopping")[0].improvement is None  # judged afresh
    assert weights_hash(tmp_path / "fork") != weights_hash(whole)


def test_a_fork_into_another_recipe_is_refused(whole, tmp_path):
    assert run_engine(tiny_config(rl_stage()), tmp_path / "fork", "--fork", str(newest_checkpoint(whole))) == 2
    [failure] = named(tmp_path / "fork", "failed")
    assert "the checkpoint lies in stage 1-rl" in failure.message
