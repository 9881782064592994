"""`cohort up` as a user runs it: real broker, web, scheduler and worker."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.waiting import wait_until

pytestmark = [pytest.mark.xdist_group("house"), pytest.mark.timeout(180)]
START_S = 60
STOP_S = 60
COHORT = [sys.executable, "-c", "from app.cli import main; main()"]


class Launched:
    """A `cohort` process of its own session, with its home, port and output file."""

    def __init__(self, home: Path, *arguments: str, port: int | None = None) -> None:
        self.home = home
        self.port = port or free_port()
        self.output = home.parent / f"{home.name}-{self.port}.out"
        self.env = os.environ | {"COHORT_HOME": str(home), "COHORT_PORT": str(self.port)}
        with open(self.output, "wb") as output:
            self.process = subprocess.Popen(
                [*COHORT, *arguments], stdout=output, stderr=output, env=self.env, start_new_session=True
            )
        self.family: list[psutil.Process] = []

    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, pattern: str, seconds: float = START_S) -> re.Match[str]:
        def found() -> re.Match[str] | None:
            assert self.process.poll() is None or re.search(pattern, self.text()), self.text()
            return re.search(pattern, self.text())

        match = wait_until(found, seconds, f"{pattern} in the output of cohort")
        assert match is not None
        self.family = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        return match

    def child(self, marker: str) -> psutil.Process:
        return next(p for p in self.family if marker in " ".join(p.cmdline()))

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*COHORT, *arguments], env=self.env, capture_output=True, text=True, check=False)

    def assert_nothing_left(self) -> None:
        def alive() -> list[psutil.Process]:
            return [p for p in self.family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

        try:
            wait_until(lambda: not alive(), 20, "no process left")
        finally:
            for process in alive():
                process.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def running(home: Path) -> Iterator[Launched]:
    launched = Launched(home, "up")
    try:
        launched.wait_for("Ctrl-C stops everything")
        yield launched
    finally:
        if launched.process.poll() is None:
            launched.process.kill()
            launched.process.wait()
    launched.assert_nothing_left()


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """One for the tests that leave it standing."""
    with running(tmp_path_factory.mktemp("house") / "home") as launched:
        yield launched


@pytest.fixture
def own_house(tmp_path: Path) -> Iterator[Launched]:
    with running(tmp_path / "home") as launched:
        yield launched


def test_ctrl_c_stops_all_in_order_and_the_next_start_finds_the_home(own_house: Launched) -> None:
    assert len(own_house.family) >= 4
    own_house.process.send_signal(signal.SIGINT)
    assert own_house.process.wait(STOP_S) == 0
    order = [own_house.text().index(f"Stopping {name}") for name in ("worker", "scheduler", "web")]
    assert order == sorted(order)
    own_house.assert_nothing_left()
    again = Launched(own_house.home, "up")
    again.wait_for("Ctrl-C stops everything")
    again.process.terminate()
    assert again.process.wait(STOP_S) == 0
    again.assert_nothing_left()


def test_the_printed_link_opens_the_web_application(house: Launched) -> None:
    link = house.wait_for(r"http://127\.0\.0\.1:\d+/login/\S+").group()
    with httpx.Client(trust_env=False) as browser:
        assert browser.get(link).status_code == 200


def test_a_child_that_dies_is_named_with_its_log(own_house: Launched) -> None:
    own_house.child("workers.scheduler").kill()
    assert own_house.process.wait(STOP_S) == 1
    assert "The scheduler ended by itself by signal SIGKILL." in own_house.text()
    assert f"{own_house.home}/logs/scheduler.log" in own_house.text()
    assert "Traceback" not in own_house.text()


def test_a_killed_launcher_leaves_no_process(own_house: Launched) -> None:
    own_house.process.kill()
    own_house.process.wait()
    own_house.assert_nothing_left()


def test_a_killed_broker_is_started_again(house: Launched) -> None:
    house.child("valkey").kill()
    house.wait_for("The broker ended by itself and was started again")


def test_a_second_launcher_and_a_taken_port_are_refused_in_one_sentence(house: Launched, tmp_path: Path) -> None:
    second = house.run("up", "--port", str(free_port()))
    assert second.returncode == 1
    assert "already served by process" in second.stderr
    elsewhere = Launched(tmp_path / "other", "up", port=house.port)
    assert elsewhere.process.wait(STOP_S) == 1
    assert f"Port {house.port} on 127.0.0.1 is taken" in elsewhere.text()
    assert len(elsewhere.text().splitlines()) == 1


def test_commands_on_the_local_home_need_no_token(house: Launched) -> None:
    listed = house.run("run", "list")
    assert (listed.returncode, listed.stdout.split(";")[0]) == (0, "There are no runs yet")
    missing = house.run("run", "show", "7")
    assert (missing.returncode, missing.stderr.startswith("Not found")) == (1, True)


def test_a_created_token_opens_the_api(house: Launched) -> None:
    token = house.run("token", "create", "laptop").stdout.strip()
    headers = {"Authorization": f"Bearer {token}"}
    me = httpx.get(f"http://127.0.0.1:{house.port}/api/v1/me", headers=headers, trust_env=False)
    assert me.json()["name"] == "admin"


def test_an_invalid_config_is_refused_with_field_and_remedy(house: Launched, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("name: bad\nmodel: {source: tiny_llama}\nstages: []\nsede: 1\n")
    refused = house.run("run", "start", "-f", str(tmp_path / "bad.yaml"))
    assert refused.returncode == 2
    assert "sede" in refused.stderr
    assert "stages" in refused.stderr
    assert "→" in refused.stderr


TINY = """
name: tiny
model: {source: tiny_llama, hidden_size: 16, num_layers: 1, num_heads: 1, intermediate_size: 16, max_context_tokens: 32}
stages:
  - kind: rl
    data: {source: addition, num_digits: 1}
    rewards: [{kind: custom, name: short}]
    num_steps: 2
    prompts_per_step: 2
    group_size: 2
    sampling: {max_new_tokens: 8}
    evaluation: {num_prompts: 2}
"""
SHORT = "def short(completions, **columns):\n    return [-float(len(text)) for text in completions]\n"


def test_a_run_with_a_reward_of_ones_own_goes_from_the_command_line_to_its_end(house: Launched, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    (tmp_path / "short.py").write_text(SHORT)
    started = house.run("run", "start", "-f", f"{tmp_path}/tiny.yaml", "--reward", f"{tmp_path}/short.py", "--follow")
    assert started.returncode == 0, started.stdout + started.stderr
    number = re.findall(r"Run (\d+) is completed", started.stdout)[0]
    shown = house.run("run", "show", number)
    assert (shown.returncode, shown.stdout.startswith(f"Run {number} is completed")) == (0, True), shown.stderr
    assert "checkpoint: 0-rl, step 2, saved: http://127.0.0.1" in shown.stdout
    assert house.run("run", "logs", number).returncode == 0
    refused = house.run("run", "cancel", number)
    assert (refused.returncode, refused.stderr.startswith("Not in this state")) == (1, True)
    attempt = next((house.home / "runs").glob("*/attempts/1"))
    imported = house.run("run", "import", str(attempt))
    assert "completed after 2 steps" in imported.stdout, imported.stderr
