"""How an attempt ended and what becomes of its run: pure decisions, used by supervisor and reaper alike."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_engine.failures import read_failure, reason_of

TERMINAL_EVENTS = ("finished", "failed", "stopped")
TAIL_LINES = 20
MEMORY_WORDS = ("CUDA out of memory", "OutOfMemoryError", "MemoryError", "DefaultCPUAllocator: can't allocate memory")
STORAGE_WORDS = ("No space left on device", "Disk quota exceeded", "StorageFull")
"""An engine whose journal cannot be written can say so in its log alone."""


@dataclass(frozen=True, slots=True)
class Outcome:
    attempt: str
    """finished, failed or stopped."""
    run: str
    """completed, failed, paused, cancelled or queued."""
    reason: str
    message: str
    traceback: str | None = None
    restart: bool = False
    """The run goes back to the queue unasked, which counts against max_restarts."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What was seen when the last process had gone."""

    terminal: Mapping[str, Any] | None
    """The journal's last terminal event; it is the truth, the exit status only a hint."""
    exit_status: int | None = None
    """Negative: killed by that signal. None: unknown."""
    failed_rank: int | None = None
    asked: bool = False
    """The supervisor had asked the engine to stop."""
    shutting_down: bool = False
    out_of_memory: bool = False
    log_tail: str = ""


def decide(run_state: str, ending: Ending, *, restarts_left: bool) -> Outcome:
    """What an attempt in a run of state `run_state` has become."""
    terminal = ending.terminal or {}
    kind = terminal.get("type")
    if kind == "finished":
        return Outcome("finished", "completed", str(terminal["reason"]), terminal.get("message") or _finished(terminal))
    if run_state == "cancelling":
        return Outcome("stopped", "cancelled", "cancelled", "cancelled; no process of it is left")
    if kind == "failed":
        reason, message = str(terminal["reason"]), str(terminal["message"])
        return Outcome("failed", "failed", reason, message, terminal.get("traceback") or None)
    if kind != "stopped" and not ending.asked:
        return _crashed(ending)
    if run_state == "pausing":
        return Outcome("stopped", "paused", "paused", _stopped(terminal, "paused"))
    if ending.shutting_down:
        return Outcome("stopped", "queued", "worker_shutdown", _stopped(terminal, "its worker was shut down"))
    message = "the engine was told to stop by someone else than its worker"
    if restarts_left:
        return Outcome("stopped", "queued", "engine_stopped", message, restart=True)
    return Outcome("failed", "failed", "engine_stopped", f"{message}, and all restarts are used up")


def _finished(terminal: Mapping[str, Any]) -> str:
    texts = {"early_stopped": "early stopping ended the run", "target_reached": "the target was reached"}
    return texts.get(str(terminal["reason"]), "all steps were trained")


def _stopped(terminal: Mapping[str, Any], why: str) -> str:
    if terminal:
        return f"{why}; it goes on from step {terminal.get('step')}"
    return f"{why}; the engine wrote no last checkpoint and goes on from the one before"


def _crashed(ending: Ending) -> Outcome:
    rank = "" if ending.failed_rank is None else f"rank {ending.failed_rank} "
    if ending.out_of_memory or any(word in ending.log_tail for word in MEMORY_WORDS):
        message = f"{rank}ran out of memory ({describe_status(ending.exit_status)})"
        return Outcome("failed", "failed", "out_of_memory", message, ending.log_tail or None)
    if any(word in ending.log_tail for word in STORAGE_WORDS):
        message = f"{rank}could not write its journal: the disk is full ({describe_status(ending.exit_status)})"
        return Outcome("failed", "failed", "storage_full", message, ending.log_tail)
    last = ending.log_tail.strip().rpartition("\n")[2]
    message = f"the engine ended without a word: {rank}{describe_status(ending.exit_status)}"
    if last:
        message += f"; last line of its log: {last}"
    return Outcome("failed", "failed", "engine_crash", message, ending.log_tail or None)


def not_started(error: Exception) -> dict[str, Any]:
    """The `failed` event of an engine that could not even be started."""
    return {"type": "failed", "reason": reason_of(error), "message": f"the engine could not be started: {error}"}


def told_by_another_rank(folder: Path) -> dict[str, Any] | None:
    """The `failed` event that rank 0 would have journaled about another rank, had it been able to; None = no failure
    is known. Only worth asking when the journal has no terminal event."""
    failure = read_failure(folder)
    return {"type": "failed", **asdict(failure)} if failure else None


def describe_status(status: int | None) -> str:
    """Example: describe_status(-9) == "killed by SIGKILL"."""
    if status is None:
        return "unknown exit status"
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def read_tail(path: Path, num_lines: int = TAIL_LINES) -> str:
    """The last lines of a log; empty when there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - 400 * num_lines))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-num_lines:])
    except OSError:
        return ""


def oom_kills() -> int:
    """Processes that the kernel killed for memory in this process's cgroup so far; 0 where that cannot be read."""
    try:
        group = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip()
        counts = (Path("/sys/fs/cgroup") / group.lstrip("/") / "memory.events").read_text().split()
        return int(counts[counts.index("oom_kill") + 1])
    except (OSError, ValueError):
        return 0
