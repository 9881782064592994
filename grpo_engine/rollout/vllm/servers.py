"""vLLM servers as children of this process: started, watched, ended. Torch-free; needs no vLLM itself.

A server listens on a socket file of its own in a folder that only this user can open: no port to collide with, nothing
open to the network. It leads a session of its own, dies with the thread that started it (`serve`), and what it leaves
behind is killed with its process group.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from grpo_engine.control import CONTROL_FD, PARENT_PID
from grpo_engine.launch import RENDEZVOUS_FD
from grpo_engine.rollout.vllm.client import UNIX

END_GRACE_S = 10.0
"""From SIGTERM to SIGKILL."""
MAX_STARTS = 4
"""Of one server within STARTS_WITHIN_S; one that dies more often is not started again."""
STARTS_WITHIN_S = 3600.0
FIRST_ERROR = re.compile(r"^(?!.* (?:WARNING|INFO) ).*?\b((?:\w+\.)*\w*(?:Error|Exception): .+)", re.MULTILINE)
LOG_SEARCHED_BYTES = 1_000_000
LONGEST_SOCKET_PATH = 100
"""The kernel takes 107 bytes."""
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", CONTROL_FD, RENDEZVOUS_FD)
"""What belongs to a rank of the trainer; vLLM would take it for its own."""

log = logging.getLogger("cohort")


class ServerProcess:
    """One server: `argv` with `--uds SOCKET`, output appended to `log_path`."""

    def __init__(self, argv: Sequence[str], *, socket_path: Path, log_path: Path, env: Mapping[str, str]) -> None:
        self.address = f"{UNIX}{socket_path}"
        self.log_path = log_path
        self._started_at_s: list[float] = []
        self._argv = [*argv, "--uds", str(socket_path)]
        self._socket_path = socket_path
        self._env = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES} | dict(env)
        self._process: subprocess.Popen[bytes] | None = None
        self._swept = False
        self._log_start = 0

    def start(self) -> None:
        """Start it, for the first time or after it ended, and return at once."""
        self.kill()
        self._swept = False
        self._socket_path.unlink(missing_ok=True)
        self._started_at_s.append(time.monotonic())
        with open(self.log_path, "ab") as log_file:
            self._log_start = log_file.tell()
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                env={**self._env, PARENT_PID: str(os.getpid())},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def may_start_again(self) -> bool:
        """False for a server that keeps dying."""
        since_s = time.monotonic() - STARTS_WITHIN_S
        return sum(started_s > since_s for started_s in self._started_at_s) < MAX_STARTS

    def poll(self) -> int | None:
        """None while it runs, else its exit status (negative: signal)."""
        return None if self._process is None else self._process.poll()

    def describe_end(self) -> str:
        """In words, with the first error that it logged in its last life."""
        with open(self.log_path, "rb") as log_file:
            log_file.seek(self._log_start)
            found = FIRST_ERROR.search(log_file.read(LOG_SEARCHED_BYTES).decode(errors="replace"))
        error = f" ({found[1][:300]})" if found else ""
        return f"it ended with status {self.poll()}{error}; its log is {self.log_path}"

    def terminate(self) -> None:
        """Ask it to end."""
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """End its whole group at once."""
        if self._process is None or self._swept:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._swept = self._process.poll() is not None  # the group's number may be another's from now on

    def end(self, deadline: float) -> None:
        """Wait until it has ended, from `deadline` (monotonic clock) on by force; nothing of its group is left."""
        if self._process is None:
            return
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.warning("the vLLM server %d did not end on request and is killed", self._process.pid)
        self.kill()
        self._process.wait()


class ServerGroup:
    """The servers that one rank starts."""

    def __init__(self, argvs: Sequence[Sequence[str]], *, log_folder: Path, name: str, env: Mapping[str, str]) -> None:
        """One server for each of `argvs`, logs `<name>-<index>.log`. Raises what starting a process raises."""
        self._folder = Path(tempfile.mkdtemp(prefix="cohort-", dir=_short_folder()))
        self.processes = [
            ServerProcess(
                argv, socket_path=self._folder / str(index), log_path=log_folder / f"{name}-{index}.log", env=env
            )
            for index, argv in enumerate(argvs)
        ]
        try:
            for process in self.processes:
                process.start()
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """End all of them together. May be called again."""
        for process in self.processes:
            process.terminate()
        deadline = time.monotonic() + END_GRACE_S
        for process in self.processes:
            process.end(deadline)
        shutil.rmtree(self._folder, ignore_errors=True)


def serve_command(arguments: Sequence[str]) -> list[str]:
    """Example: serve_command(["--model=/m"]) ends in ["-m", "grpo_engine.rollout.vllm.serve", "--model=/m"]."""
    return [sys.executable, "-m", "grpo_engine.rollout.vllm.serve", *arguments]


def serve_environment(num_threads: int, cuda_device: int | None) -> dict[str, str]:
    """Threads a server may use, and the rank's GPU (its index among those this process sees), None on the CPU."""
    variables = {
        "VLLM_SERVER_DEV_MODE": "1",  # weight updates are endpoints of the development mode
        "OMP_NUM_THREADS": str(num_threads),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    if cuda_device is None:
        # Else the worker is one more process, for nothing: 1 GB and a minute of starting.
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    else:
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        variables["CUDA_VISIBLE_DEVICES"] = visible[cuda_device] if visible else str(cuda_device)
    return variables


def _short_folder() -> str:
    folder = tempfile.gettempdir()
    return folder if len(folder) < LONGEST_SOCKET_PATH - len("/cohort-xxxxxxxx/63") else "/tmp"
