"""What a slot's server decides for itself, without a program."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from typing import cast

import pytest

from grpo_engine.reward.sandbox.inside.server import Server, is_overfull
from tests.ended import is_gone, told_before_its_kill
from tests.waiting import wait_until


@dataclass
class Entry:
    """A file of so many blocks of 512 bytes; None: it has gone since the folder was read."""

    blocks: int | None

    def stat(self, *, follow_symlinks: bool) -> Entry:
        if self.blocks is None:
            raise FileNotFoundError
        return self

    @property
    def st_blocks(self) -> int:
        assert self.blocks is not None
        return self.blocks


@pytest.mark.parametrize(
    ("blocks", "full"),
    [([2, 2], False), ([2, 3], True), ([None, 2, None, 3], True), ([], False), ([0] * 4096, False), ([0] * 4097, True)],
)
def test_a_folder_is_overfull_whatever_vanishes_from_it_meanwhile(blocks: list[int | None], full: bool) -> None:
    assert is_overfull(cast("list[os.DirEntry[str]]", [Entry(count) for count in blocks]), 4 * 512) is full


def test_a_process_is_killed_with_its_group_and_also_before_it_has_one() -> None:
    kill = partial(Server._kill, cast(Server, None))
    with subprocess.Popen(["sleep", "600"]) as alone:
        kill(alone.pid)
        assert alone.wait(30) == -9
    command = ["sh", "-c", "sleep 600 & echo $!; wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as leader:
        assert leader.stdout is not None
        below = int(leader.stdout.readline())
        kill(leader.pid)
        assert leader.wait(30) == -9
    wait_until(lambda: is_gone(below), 30, "its group ended")


def test_a_process_whose_server_has_ended_runs_nothing() -> None:
    code = (
        "import ctypes\n"
        "from grpo_engine.reward.sandbox.inside.confine import Cell, Limits\n"
        "Cell(ctypes.CDLL(None), None, None).enter({server}, 0, Limits(5, 1 << 32, 1 << 20, 999), '/')\n"
        "print('confined')"
    )
    own = "__import__('os').getppid()"
    said = [
        subprocess.run([sys.executable, "-c", code.format(server=server)], capture_output=True, text=True, timeout=60)
        for server in (own, f"{own} + 1")
    ]
    assert [one.stdout for one in said] == ["confined\n", ""]
    assert "server has ended" in said[1].stderr


def test_a_confined_process_ends_with_its_server() -> None:
    code = (
        "import ctypes, os, time\n"
        "from grpo_engine.reward.sandbox.inside.confine import Cell, Limits\n"
        "server = os.getpid()\n"
        "if os.fork() == 0:\n"
        "    users = [30_000, 30_001] if os.geteuid() == 0 else None\n"
        "    Cell(ctypes.CDLL(None), None, users).enter(server, 0, Limits(5, 1 << 32, 1 << 20, 999), '/')\n"
        "    print(os.getpid(), flush=True)\n"
        "time.sleep(600)"
    )
    pid = told_before_its_kill(code)
    wait_until(lambda: is_gone(pid), 30, "the confined process ended")
