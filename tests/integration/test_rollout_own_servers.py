"""vLLM servers as children of the engine, with a stand-in for vLLM: started, started again, ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_engine.errors import RolloutUnavailable
from grpo_engine.launch import process_table
from grpo_engine.rollout.vllm import joining, options
from grpo_engine.rollout.vllm.servers import MAX_STARTS
from tests.stand_in_pool import REQUESTS, SAMPLING, WEIGHTS, make
from tests.waiting import wait_until

# A connection whose server is killed while the HTTP library makes it is closed by the collector, which warns of it.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")


@pytest.fixture
def stand_in_command(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "tests.vllm_stand_in"]
    monkeypatch.setattr(joining, "serve_command", lambda arguments: command)
    monkeypatch.setattr(options, "require_vllm", lambda: None)


BROKEN = "print(' WARNING OSError: many files', flush=True); raise ValueError('no memory')"


def own_pids() -> list[int]:
    """Stand-ins that are children of this process."""
    return [pid for pid, (parent, state) in process_table().items() if parent == os.getpid() and is_stand_in(pid)]


def is_stand_in(pid: int) -> bool:
    try:
        return b"tests.vllm_stand_in" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.mark.usefixtures("stand_in_command")
def test_servers_of_our_own_are_started_started_again_after_a_crash_and_ended(tmp_path: Path) -> None:
    sampler = make(tmp_path, [], num_servers=2)
    sampler.load_weights(WEIGHTS.items(), 1)
    assert len(sampler.sample(REQUESTS, SAMPLING)) == 6
    first = own_pids()
    os.kill(first[0], signal.SIGKILL)
    assert len(sampler.sample(REQUESTS, SAMPLING)) == 6
    wait_until(lambda: sampler.sample(REQUESTS, SAMPLING) and len(sampler.replicas()) == 2, 30, "two servers again")
    assert (tmp_path / "vllm-1.log").exists()
    sampler.close()
    assert own_pids() == []


@pytest.mark.usefixtures("stand_in_command")
def test_a_server_that_keeps_dying_ends_the_run(tmp_path: Path) -> None:
    sampler = make(tmp_path, [])
    sampler.load_weights(WEIGHTS.items(), 1)
    with pytest.raises(RolloutUnavailable, match=r"ended with status -9; its log is .*vllm-0\.log"):  # noqa: PT012
        for _ in range(MAX_STARTS):
            os.kill(own_pids()[0], signal.SIGKILL)
            sampler.sample(REQUESTS, SAMPLING)
    sampler.close()


def test_a_server_that_cannot_start_is_named_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "serve_command", lambda arguments: [sys.executable, "-c", BROKEN])
    monkeypatch.setattr(options, "require_vllm", lambda: None)
    with pytest.raises(RolloutUnavailable, match=r"status 1 \(ValueError: no memory\); its log is .*vllm-0\.log"):
        make(tmp_path, [])


ENGINE = """
import sys, pathlib
from tests.integration import test_rollout_own_servers as t
t.joining.serve_command = lambda arguments: [sys.executable, "-m", "tests.vllm_stand_in"]
t.options.require_vllm = lambda: None
sampler = t.make(pathlib.Path(sys.argv[1]), [], num_servers=2)
print(*t.own_pids(), flush=True)
sys.stdin.read()
"""


def test_servers_die_with_an_engine_that_is_killed(tmp_path: Path) -> None:
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with engine:
        assert engine.stdout is not None
        pids = [int(pid) for pid in engine.stdout.readline().split()]
        engine.kill()
    assert len(pids) == 2
    wait_until(lambda: not any(is_stand_in(pid) for pid in pids), 10, "the servers have gone")
