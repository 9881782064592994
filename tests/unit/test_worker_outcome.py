"""How an attempt's end becomes its run's state: every kind of end in every state of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_engine.errors import DataError
from grpo_engine.failures import write_failure
from workers.outcome import Ending, decide, describe_status, told_by_another_rank

FINISHED = {"type": "finished", "reason": "early_stopped", "message": ""}
FAILED = {"type": "failed", "reason": "data_error", "message": "no rows", "traceback": "t"}
STOPPED = {"type": "stopped", "step": 7}

CASES: list[tuple[str, dict[str, Any], str, str, str]] = [
    ("running", {"terminal": FINISHED}, "finished", "completed", "early_stopped"),
    ("running", {"terminal": FINISHED, "exit_status": -9}, "finished", "completed", "early_stopped"),
    ("cancelling", {"terminal": FINISHED, "asked": True}, "finished", "completed", "early_stopped"),
    ("pausing", {"terminal": FINISHED, "asked": True}, "finished", "completed", "early_stopped"),
    ("running", {"terminal": FAILED}, "failed", "failed", "data_error"),
    ("pausing", {"terminal": FAILED, "asked": True}, "failed", "failed", "data_error"),
    ("cancelling", {"terminal": FAILED, "asked": True}, "stopped", "cancelled", "cancelled"),
    ("cancelling", {"terminal": STOPPED, "asked": True}, "stopped", "cancelled", "cancelled"),
    ("cancelling", {"terminal": None, "asked": True, "exit_status": -9}, "stopped", "cancelled", "cancelled"),
    ("pausing", {"terminal": STOPPED, "asked": True}, "stopped", "paused", "paused"),
    ("pausing", {"terminal": None, "asked": True, "exit_status": -9}, "stopped", "paused", "paused"),
    ("running", {"terminal": STOPPED, "asked": True, "shutting_down": True}, "stopped", "queued", "worker_shutdown"),
    ("starting", {"terminal": None, "asked": True, "shutting_down": True}, "stopped", "queued", "worker_shutdown"),
    ("pausing", {"terminal": STOPPED, "asked": True, "shutting_down": True}, "stopped", "paused", "paused"),
    ("running", {"terminal": STOPPED}, "stopped", "queued", "engine_stopped"),
    ("running", {"terminal": None, "exit_status": -11}, "failed", "failed", "engine_crash"),
    ("starting", {"terminal": None, "exit_status": 1}, "failed", "failed", "engine_crash"),
    ("running", {"terminal": None, "exit_status": 0}, "failed", "failed", "engine_crash"),
    ("running", {"terminal": None, "exit_status": -9, "out_of_memory": True}, "failed", "failed", "out_of_memory"),
    ("running", {"terminal": None, "exit_status": 1, "log_tail": "MemoryError"}, "failed", "failed", "out_of_memory"),
    ("running", {"terminal": None, "log_tail": "No space left on device"}, "failed", "failed", "storage_full"),
]


@pytest.mark.parametrize(("state", "ending", "attempt", "run", "reason"), CASES)
def test_an_end_decides_attempt_run_and_reason(
    state: str, ending: dict[str, Any], attempt: str, run: str, reason: str
) -> None:
    outcome = decide(state, Ending(**ending), restarts_left=True)

    assert (outcome.attempt, outcome.run, outcome.reason) == (attempt, run, reason)
    assert outcome.message


def test_a_stop_from_elsewhere_counts_as_a_restart_until_none_is_left() -> None:
    assert decide("running", Ending(terminal=STOPPED), restarts_left=True).restart
    assert decide("running", Ending(terminal=STOPPED), restarts_left=False).run == "failed"


def test_a_crash_names_rank_signal_and_the_last_line_of_the_log() -> None:
    ending = Ending(terminal=None, exit_status=-11, failed_rank=1, log_tail="loading\nabout to divide")

    assert decide("running", ending, restarts_left=True).message == (
        "the engine ended without a word: rank 1 killed by SIGSEGV; last line of its log: about to divide"
    )


def test_a_failure_that_another_rank_left_counts_as_journaled(tmp_path: Path) -> None:
    assert told_by_another_rank(tmp_path) is None
    write_failure(tmp_path, 1, DataError("no rows"))

    outcome = decide("pausing", Ending(told_by_another_rank(tmp_path), asked=True), restarts_left=True)
    assert (outcome.run, outcome.reason, outcome.message) == ("failed", "data_error", "rank 1: no rows")
    assert "DataError: no rows" in str(outcome.traceback)


def test_an_exit_status_is_told_in_words() -> None:
    told = [describe_status(status) for status in (0, 3, -9, -99, None)]

    assert told == [
        "exited with status 0",
        "exited with status 3",
        "killed by SIGKILL",
        "killed by signal 99",
        "unknown exit status",
    ]
