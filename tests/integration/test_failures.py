"""What a rank leaves when it fails, and what rank 0 makes of it."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from grpo_engine import events
from grpo_engine.communicator import SingleRank
from grpo_engine.control import Control, SharedControl
from grpo_engine.errors import BrokenCollective, DataError, InvalidConfig, LeaseLost, NonFinite
from grpo_engine.events import Journal
from grpo_engine.failures import end_rank, failure_of, read_failure, reason_of, remove_failures, write_failure


class LostControl(SharedControl):
    def wait_until_allowed(self) -> None:
        raise LeaseLost("lost")


def end(folder: Path, error: Exception, *, rank: int = 0, ended: Collection[int] = (), lost: bool = False) -> int:
    make: Callable[..., SharedControl] = LostControl if lost else SharedControl
    control = make(Control(), SingleRank())
    with Journal(folder) as journal:
        return end_rank(error, rank=rank, folder=folder, journal=journal, control=control, ended_ranks=lambda: ended)


def journaled(folder: Path) -> list[tuple[str, str]]:
    return [(event.reason, event.message) for event in events.read(folder) if isinstance(event, events.Failed)]


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


REASONS = [
    (DataError("x"), "data_error"),
    (MemoryError(), "out_of_memory"),
    (OutOfMemoryError("CUDA out of memory"), "out_of_memory"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out_of_memory"),
    (OSError(errno.ENOSPC, "full"), "storage_full"),
    (OSError(errno.ENOENT, "missing"), "engine_crash"),
    (KeyError("x"), "engine_crash"),
]


@pytest.mark.parametrize(("error", "reason"), REASONS)
def test_every_error_has_a_typed_reason(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason


def test_an_error_without_words_is_told_by_its_name() -> None:
    assert failure_of(ValueError()).message == "ValueError"


def test_another_rank_leaves_a_file_and_writes_no_journal(tmp_path: Path) -> None:
    assert end(tmp_path, NonFinite("the loss stayed NaN"), rank=3) == 1

    failure = read_failure(tmp_path)
    assert failure is not None
    assert (failure.reason, failure.message) == ("non_finite", "rank 3: the loss stayed NaN")
    assert "NonFinite: the loss stayed NaN" in failure.traceback
    assert journaled(tmp_path) == []
    assert [path.name for path in tmp_path.glob("failure*")] == ["failure-rank-3.json"]


def test_a_refused_config_has_a_status_of_its_own_on_every_rank(tmp_path: Path) -> None:
    assert end(tmp_path, InvalidConfig([]), rank=1) == 2


def test_the_lowest_rank_speaks_and_files_of_an_earlier_start_are_dropped(tmp_path: Path) -> None:
    for rank in (10, 2):
        write_failure(tmp_path, rank, DataError("no rows"))
    found = read_failure(tmp_path)
    remove_failures(tmp_path)

    assert found is not None
    assert found.message == "rank 2: no rows"
    assert read_failure(tmp_path) is None


def test_a_damaged_file_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "failure-rank-1.json").write_text(json.dumps({"reason": "x"}))
    failure = read_failure(tmp_path)

    assert failure is not None
    assert "rank 1: its failure-rank-1.json cannot be read" in failure.message


def test_a_folder_that_cannot_be_written_hides_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_failure(tmp_path / "missing", 1, DataError("no rows"))

    assert "cannot write" in caplog.text


def test_rank_0_journals_its_own_failure_whatever_others_left(tmp_path: Path) -> None:
    write_failure(tmp_path, 1, DataError("no rows"))

    assert end(tmp_path, NonFinite("NaN")) == 1
    assert journaled(tmp_path) == [("non_finite", "NaN")]


def test_rank_0_journals_the_cause_of_a_broken_collective(tmp_path: Path) -> None:
    write_failure(tmp_path, 1, DataError("no rows"))

    assert end(tmp_path, BrokenCollective("gone")) == 1
    assert journaled(tmp_path) == [("data_error", "rank 1: no rows")]


def test_a_rank_that_was_killed_is_named(tmp_path: Path) -> None:
    end(tmp_path, BrokenCollective("gone"), ended=[2, 1])

    message = "rank 1 and rank 2 ended without a word: killed or crashed; see engine.log"
    assert journaled(tmp_path) == [("engine_crash", message)]


def test_a_collective_that_broke_because_the_run_was_lost_is_no_failure(tmp_path: Path) -> None:
    assert end(tmp_path, BrokenCollective("gone"), ended=[1], lost=True) == 1
    assert end(tmp_path / "own", LeaseLost("lost")) == 1

    assert journaled(tmp_path) == journaled(tmp_path / "own") == []
    assert read_failure(tmp_path) is None


def test_a_victim_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_engine.failures.PEER_WAIT_S", 0.05)

    assert end(tmp_path, BrokenCollective("gone"), rank=1) == 1
    assert read_failure(tmp_path) is None
