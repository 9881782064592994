"""`cohort checkpoint merge` as typed; what merging does is tested in test_adapter_checkpoints."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.typed import Typed


def test_merging_a_folder_that_is_no_checkpoint_says_so_and_makes_nothing(typed: Typed, tmp_path: Path) -> None:
    status, _, shown = typed("checkpoint", "merge", str(tmp_path), str(tmp_path / "out"))
    assert status == 1
    assert "a folder without its manifest is no checkpoint" in shown
    assert not (tmp_path / "out").exists()


def test_merging_runs_the_engine_with_what_was_typed(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    assert typed("checkpoint", "merge", "there/0-rl-000010", "out", "--base", "moved")[0] == 0
    engine = ["-m", "grpo_engine", "merge-checkpoint"]
    assert commands[0][1:] == [*engine, "there/0-rl-000010", "--out", "out", "--base", "moved"]
