"""The real engine on two ranks: the one-rank run's result, one writer, and no rank outlives another's failure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
import torch
from safetensors.torch import load_file

from grpo_engine.config import RunConfig
from grpo_engine.events import boot_clock_s
from grpo_engine.launch import Ranks, start_ranks
from tests.engine_configs import rl_stage, sft_stage, tiny_config
from tests.engine_process import named, newest_checkpoint, run_engine, start_engine, steps_seen
from tests.waiting import wait_until

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.timeout(300)]

# A large epsilon: a step is then proportional to the gradient, not to its sign, which float noise may turn near 0.
OPTIMIZER = {"learning_rate": 1e-2, "epsilon": 1e-3}
STAGES = (
    sft_stage(num_steps=3, optimizer=OPTIMIZER),
    rl_stage(num_steps=4, optimizer=OPTIMIZER, prompts_per_step=5, kl={"weight": 0.01}, checkpoint={"every_steps": 2}),
)
ENDLESS = rl_stage(num_steps=100_000, checkpoint={"every_steps": 50}, evaluation={"every_steps": 1000})
SPOILED = ("time/", "throughput/", "memory/", "rollout/")
"""Metrics that are not the same in every run."""


def on_ranks(num_ranks: int, *stages: dict[str, Any], **changes: Any) -> RunConfig:
    return tiny_config(*stages, needs={"num_ranks": num_ranks}, **changes)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(newest_checkpoint(folder) / "model.safetensors")


def metrics_of(folder: Path, stage: str, step: int) -> dict[str, float]:
    [event] = [event for event in named(folder, "metrics") if (event.stage, event.step) == (stage, step)]
    return {name: value for name, value in event.values.items() if not name.startswith(SPOILED)}


def rank_pids(command: subprocess.Popen[str]) -> list[int]:
    """Processes of the ranks, in rank order."""
    children = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()
    found = {}
    for pid in map(int, children):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found[next(value for value in variables if value.startswith(b"RANK="))] = pid
    return [found[name] for name in sorted(found)]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks") / "one"
    assert run_engine(on_ranks(1, *STAGES), folder) == 0
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks") / "two"
    assert run_engine(on_ranks(2, *STAGES), folder) == 0
    return folder


def test_two_ranks_tell_the_whole_run_once(two: Path) -> None:
    assert [event.type for event in named(two, "started") + named(two, "finished")] == ["started", "finished"]
    trained = [(event.stage, event.step) for event in named(two, "trained")]
    assert trained == [("0-sft", step) for step in (1, 2, 3)] + [("1-rl", step) for step in (1, 2, 3, 4)]
    assert not list(two.glob("failure-rank-*"))
    assert "rank 0 ended: finished" in (two / "engine.log").read_text()


def test_rollouts_hold_every_group_of_both_ranks(two: Path) -> None:
    for event in named(two, "rollouts"):
        table = parquet.read_table(two / event.path)
        assert table.num_rows == 5 * 4
        assert len(set(table.column("group_id").to_pylist())) == event.num_groups == 5


def test_two_ranks_begin_with_the_one_rank_runs_step(one: Path, two: Path) -> None:
    for stage in ("0-sft", "1-rl"):
        first, second = metrics_of(one, stage, 1), metrics_of(two, stage, 1)
        assert first.keys() == second.keys()
        assert second == pytest.approx(first, rel=1e-6, abs=1e-6)


def test_two_ranks_end_with_the_one_rank_runs_weights(one: Path, two: Path) -> None:
    first, second = weights(one), weights(two)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=0, atol=1e-5)


def test_a_checkpoint_of_two_ranks_goes_on_to_the_same_weights(two: Path, tmp_path: Path) -> None:
    middle = two / "checkpoints" / "1-rl-000002"
    assert run_engine(on_ranks(2, *STAGES), tmp_path / "resumed", "--resume", str(middle)) == 0
    resumed = weights(tmp_path / "resumed")
    assert all(torch.equal(resumed[name], tensor) for name, tensor in weights(two).items())


@pytest.mark.slow
def test_random_rewards_and_a_critic_go_on_on_both_ranks(tmp_path: Path) -> None:
    source = tmp_path / "dice.py"
    source.write_text("import random\n\ndef reward(completions):\n    return [random.random() for _ in completions]\n")
    stage = rl_stage(num_steps=4, advantage={"kind": "gae"}, rewards=[{"kind": "custom", "name": "dice"}])
    config = on_ranks(2, stage | {"checkpoint": {"every_steps": 2}})
    reward = ("--reward", f"dice={source}")
    assert run_engine(config, tmp_path / "whole", *reward) == 0
    middle = str(tmp_path / "whole" / "checkpoints" / "0-rl-000002")
    assert run_engine(config, tmp_path / "resumed", *reward, "--resume", middle) == 0

    assert metrics_of(tmp_path / "resumed", "0-rl", 4) == metrics_of(tmp_path / "whole", "0-rl", 4)
    resumed = weights(tmp_path / "resumed")
    assert all(torch.equal(resumed[name], tensor) for name, tensor in weights(tmp_path / "whole").items())


LOADS_ON_RANK_0 = """
import os

if os.environ["RANK"] == "1":
    raise ValueError("only rank 0 may load this")

def reward(completions):
    return [float(len(text)) for text in completions]
"""


def test_a_failing_rank_ends_the_run_with_its_reason_and_traceback(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(LOADS_ON_RANK_0)
    config = on_ranks(2, rl_stage(rewards=[{"kind": "custom", "name": "odd"}]))
    assert run_engine(config, tmp_path / "run", "--reward", f"odd={tmp_path / 'odd.py'}") == 1
    [failure] = named(tmp_path / "run", "failed")

    assert failure.reason == "reward_error"
    assert "rank 1: reward 'odd': it fails when it is loaded: ValueError: only rank 0 may load this" in failure.message
    assert "RewardError" in failure.traceback


def test_a_config_that_both_ranks_refuse_is_told_once(tmp_path: Path) -> None:
    model = {"source": "folder", "path": str(tmp_path / "absent")}
    assert run_engine(on_ranks(2, model=model), tmp_path / "run") == 2

    [failure] = named(tmp_path / "run", "failed")
    assert failure.reason == "invalid_config"
    assert failure.message.startswith("model.path = ")


BREAKS_A_STEP = """
import importlib.util, os, sys

LEARNER = "grpo_engine.training.learner"

class Breaking:
    def find_spec(self, name, path=None, target=None):
        if name != LEARNER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (load(module), setattr(module.TorchLearner, "step", break_down))
        return spec

def break_down(learner):
    raise ArithmeticError("rank 1 cannot add")

if os.environ.get("RANK") == "1":
    sys.meta_path.insert(0, Breaking())
"""
"""A sitecustomize.py: Python imports it before anything else."""


def test_a_rank_that_fails_while_the_other_waits_for_its_gradient_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(BREAKS_A_STEP)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert run_engine(on_ranks(2, rl_stage()), tmp_path / "run") == 1
    [failure] = named(tmp_path / "run", "failed")

    assert (failure.reason, failure.message) == ("engine_crash", "rank 1: rank 1 cannot add")
    assert 'raise ArithmeticError("rank 1 cannot add")' in failure.traceback
    assert steps_seen(tmp_path / "run", "0-rl") == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_run_and_leaves_nothing_running(rank: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = start_engine(on_ranks(2, ENDLESS), folder)
    wait_until(lambda: steps_seen(folder, "0-rl") >= 2, 120, "two steps")
    pids = rank_pids(command)
    os.kill(pids[rank], signal.SIGKILL)
    output, _ = command.communicate(timeout=60)

    assert command.returncode != 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    failures = [(event.reason, event.message) for event in named(folder, "failed")]
    message = "rank 1 ended without a word: killed or crashed; see engine.log"
    assert failures == ([("engine_crash", message)] if rank == 1 else [])  # rank 0 alone can journal
    assert "the engine ended with status" in output


def test_a_stop_reaches_both_ranks_at_the_same_step(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = start_engine(on_ranks(2, ENDLESS), folder)
    wait_until(lambda: steps_seen(folder, "0-rl") >= 3, 120, "three steps")
    command.send_signal(signal.SIGTERM)
    output, _ = command.communicate(timeout=120)

    assert command.returncode == 0, output
    [stopped] = named(folder, "stopped")
    assert newest_checkpoint(folder).name == f"0-rl-{stopped.step:06d}"
    assert stopped.step == steps_seen(folder, "0-rl")


@pytest.fixture
def by_hand(tmp_path: Path) -> Iterator[Callable[[dict[str, Any]], Ranks]]:
    """Starts two ranks on a stage, in tmp_path, as a supervisor would; one step is done when it returns."""
    started: list[Ranks] = []

    def start(stage: dict[str, Any]) -> Ranks:
        (tmp_path / "config.json").write_text(on_ranks(2, stage).model_dump_json())
        argv = [sys.executable, "-m", "grpo_engine", "rank", "--config", str(tmp_path / "config.json")]
        ranks = start_ranks([*argv, "--out", str(tmp_path)], num_ranks=2, log_path=tmp_path / "engine.log")
        started.append(ranks)
        wait_until(lambda: steps_seen(tmp_path, "0-rl") >= 1 or ranks.poll() is not None, 120, "a step")
        return ranks

    yield start
    for ranks in started:
        ranks.stop(0)


@pytest.mark.slow
def test_a_message_of_the_operator_moves_both_ranks(by_hand: Callable[..., Ranks], tmp_path: Path) -> None:
    ranks = by_hand(ENDLESS | {"early_stopping": {"mode": "observe", "warmup_steps": 8}})
    ranks.send({"early_stopping": "stop"})
    wait_until(lambda: ranks.poll() is not None, 120, "both ranks ended")

    assert (ranks.poll(), ranks.failed_rank) == (0, None)
    assert [event.reason for event in named(tmp_path, "finished")] == ["early_stopped"]


@pytest.mark.slow
def test_a_missed_deadline_holds_both_ranks_and_breaks_neither(by_hand: Callable[..., Ranks], tmp_path: Path) -> None:
    ranks = by_hand(ENDLESS)
    ranks.send({"deadline_boot_s": boot_clock_s() - 1})
    wait_until(lambda: is_still(tmp_path), 20, "no more steps")
    reached = steps_seen(tmp_path, "0-rl")
    ranks.send({"deadline_boot_s": boot_clock_s() + 600})
    wait_until(lambda: steps_seen(tmp_path, "0-rl") > reached, 60, "it goes on")

    assert (ranks.stop(60), ranks.failed_rank) == (0, None)


def test_a_lost_run_ends_both_ranks_without_a_failure(by_hand: Callable[..., Ranks], tmp_path: Path) -> None:
    ranks = by_hand(ENDLESS)
    ranks.send({"lost": True})
    wait_until(lambda: ranks.poll() is not None, 60, "both ranks ended")

    assert ranks.poll() == 1
    assert named(tmp_path, "failed") == []
    assert not list(tmp_path.glob("failure-rank-*"))


def is_still(folder: Path) -> bool:
    before = steps_seen(folder, "0-rl")
    try:
        wait_until(lambda: steps_seen(folder, "0-rl") > before, 1.5, "a step")
    except AssertionError:
        return True
    return False
