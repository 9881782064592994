"""How a rank's failure is told. Torch-free.

Rank 0 alone journals. Another rank that fails leaves `failure-rank-<n>.json` in the attempt's folder and ends; rank 0,
whose next collective then breaks, finds the file and journals that cause as its own last word. Where rank 0 can no
longer do so, whoever started the ranks reads the file.
"""

from __future__ import annotations

import errno
import json
import logging
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from grpo_engine.control import SharedControl
from grpo_engine.errors import BrokenCollective, EngineError, InvalidConfig, LeaseLost
from grpo_engine.events import Journal

FILE_PATTERN = "failure-rank-*.json"
PEER_WAIT_S = 5.0
"""For a failing peer to write its file; well below launch.FAILURE_GRACE_S, in which rank 0 must also journal it."""
ENDED_WAIT_S = 0.5
"""After a peer's process ended. Not at once: a supervisor that kills all ranks hits one of them first."""
_PAUSE_S = 0.02
log = logging.getLogger("cohort")


@dataclass(frozen=True, slots=True)
class Failure:
    """Example: Failure("reward_error", "rank 1: reward 'brevity' raised ...", "Traceback ...")"""

    reason: str
    message: str
    traceback: str


def failure_of(error: BaseException) -> Failure:
    text = "".join(traceback.format_exception(error))
    return Failure(reason_of(error), str(error) or type(error).__name__, text)


def reason_of(error: BaseException) -> str:
    """The typed reason of an error. torch's out-of-memory errors are known by name: this file does not import torch."""
    if isinstance(error, EngineError):
        return error.reason
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & {"MemoryError", "OutOfMemoryError"} or "can't allocate memory" in str(error):
        return "out_of_memory"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return "storage_full"
    return "engine_crash"


def is_broken_collective(error: BaseException) -> bool:
    """True when a peer's end, not this rank, is the cause: the error or one it was raised from says so."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, BrokenCollective):
            return True
        seen = seen.__cause__
    return False


# ---------------------------------------------------------------- files
def write_failure(folder: Path, rank: int, error: BaseException) -> None:
    """Leave rank `rank`'s error for rank 0. Whole or not at all; a disk that refuses is told in the log."""
    path = folder / f"failure-rank-{rank}.json"
    aside = path.with_suffix(".tmp")
    try:
        aside.write_text(json.dumps(asdict(failure_of(error)), ensure_ascii=False))
        aside.replace(path)
    except OSError as refused:
        log.error("cannot write %s: %s", path, refused)


def read_failure(folder: Path) -> Failure | None:
    """The cause that a rank other than 0 left, with `rank n: ` before its message; the lowest rank's when several."""
    paths = sorted(folder.glob(FILE_PATTERN), key=_rank_of)
    if not paths:
        return None
    try:
        told = Failure(**json.loads(paths[0].read_text()))
    except (OSError, ValueError, TypeError) as damaged:
        return Failure("engine_crash", f"rank {_rank_of(paths[0])}: its {paths[0].name} cannot be read: {damaged}", "")
    return Failure(told.reason, f"rank {_rank_of(paths[0])}: {told.message}", told.traceback)


def remove_failures(folder: Path) -> None:
    """Drop what an earlier start in the same folder left."""
    for path in folder.glob(FILE_PATTERN):
        path.unlink()


def _rank_of(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def wait_for_peer_failure(
    folder: Path, timeout_s: float, ended_ranks: Callable[[], Collection[int]] = tuple
) -> Failure | None:
    """What a peer left within `timeout_s`, or within ENDED_WAIT_S of a peer's end; None when there is nothing."""
    deadline = time.monotonic() + timeout_s
    while (failure := read_failure(folder)) is None and time.monotonic() < deadline:
        if ended_ranks():
            deadline = min(deadline, time.monotonic() + ENDED_WAIT_S)
            ended_ranks = tuple
        time.sleep(_PAUSE_S)
    return failure


# ---------------------------------------------------------------- a rank's last word
def end_rank(
    error: Exception,
    *,
    rank: int,
    folder: Path,
    journal: Journal,
    control: SharedControl,
    ended_ranks: Callable[[], Collection[int]],
) -> int:
    """Tell why this rank ends, in the journal (rank 0) or a file, and return its exit status: 2 for InvalidConfig.

    Nothing is told of an attempt that was lost: its successor owns the run."""
    if isinstance(error, LeaseLost):
        log.error("%s", error)
    elif rank == 0:
        _journal_cause(error, folder, journal, control, ended_ranks)
    elif is_broken_collective(error):  # another rank is the cause; let it, and then rank 0, end first
        log.error("this rank ends because another did: %s", error)
        wait_for_peer_failure(folder, PEER_WAIT_S)
    else:
        log.error("%s", failure_of(error).traceback)
        write_failure(folder, rank, error)
    return 2 if isinstance(error, InvalidConfig) else 1


def _journal_cause(
    error: Exception,
    folder: Path,
    journal: Journal,
    control: SharedControl,
    ended_ranks: Callable[[], Collection[int]],
) -> None:
    failure = failure_of(error)
    log.error("%s: %s\n%s", failure.reason, failure.message, failure.traceback)
    if is_broken_collective(error):
        told = wait_for_peer_failure(folder, PEER_WAIT_S, ended_ranks)
        try:
            control.wait_until_allowed()  # the peer may have gone because the run is another attempt's by now
        except LeaseLost as lost:
            log.error("%s", lost)
            return
        failure = told or _without_a_word(failure, ended_ranks())
    journal.append("failed", **asdict(failure))


def _without_a_word(own: Failure, ended: Collection[int]) -> Failure:
    if not ended:
        return own
    ranks = "rank " + " and rank ".join(map(str, sorted(ended)))
    message = f"{ranks} ended without a word: killed or crashed; see engine.log"
    return Failure(own.reason, message, own.traceback)
