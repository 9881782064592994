"""The journal: what the engine knows, on disk before anyone else hears of it. Torch-free.

One JSON object a line: `seq` (1, 2, 3 … within the attempt), `time` (UTC, ISO), `type`, `stage` (`1-rl`), payload.
Strict JSON: a non-finite metric is null with its kind in `nonfinite`. Readers tolerate a torn last line.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from grpo_engine.errors import StorageFull

JOURNAL_NAME = "journal.jsonl"
NonFiniteKind = Literal["nan", "+inf", "-inf"]


class Event(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    seq: int = Field(ge=1)
    time: datetime
    stage: str | None = None
    """Index and kind of the stage, such as `1-rl`; None outside stages."""


class Started(Event):
    """The engine is up. First event of an attempt."""

    type: Literal["started"] = "started"
    config_hash: str
    resumed_from: str | None = None
    """Path of the checkpoint it continues from."""
    stage_index: int = 0
    step: int = 0
    """Steps of that stage already done."""
    total_steps: int = 0
    """Steps of all stages."""
    versions: dict[str, str] = Field(default_factory=dict)
    git_commit: str | None = None


class StageStarted(Event):
    type: Literal["stage_started"] = "stage_started"
    step: int
    """Steps of the stage already done."""
    num_steps: int


class Heartbeat(Event):
    type: Literal["heartbeat"] = "heartbeat"
    next_within_s: float = Field(gt=0)
    """The engine promises its next event within this many seconds."""
    doing: str = ""


class Metrics(Event):
    """Values of one step."""

    type: Literal["metrics"] = "metrics"
    step: int
    values: dict[str, float | None]
    """Name -> number; null when not finite."""
    nonfinite: dict[str, NonFiniteKind] = Field(default_factory=dict)


class Rollouts(Event):
    """A batch of rollouts is on disk; written before training on it."""

    type: Literal["rollouts"] = "rollouts"
    batch: int
    path: str
    """Relative to the attempt's directory."""
    num_groups: int
    num_completions: int
    policy_version: int = 0


class Trained(Event):
    """One optimizer step was done. Boot-clock seconds prove on one host that no two engines overlapped."""

    type: Literal["trained"] = "trained"
    step: int
    batches: list[int] = Field(default_factory=list)
    dropped: dict[str, int] = Field(default_factory=dict)
    """Reason -> groups not trained on."""
    applied: bool = True
    started_boot_s: float
    ended_boot_s: float


class WeightSync(Event):
    """The sampler took over the trainer's weights into a copy of its own, and the probe compared them."""

    type: Literal["weight_sync"] = "weight_sync"
    step: int
    policy_version: int
    checksum: str
    """Of names, shapes and bits of what rank 0 sent; 16 hexadecimal digits."""
    seconds: float
    """Without the probe; the slowest rank's, repetition included."""
    probe_gap_nats: float | None
    """Largest difference of a probe token's log-probability; null when it is not finite."""
    choice_gap_nats: float | None
    """Most by which the trainer finds another token likelier than the one taken greedily."""
    repeated: bool = False


class CheckpointSaved(Event):
    type: Literal["checkpoint"] = "checkpoint"
    step: int
    path: str
    """Relative to the attempt's directory."""
    bytes: int
    sha256: str
    """SHA-256 of manifest.json, which lists the hash of every file."""
    metrics: dict[str, float] = Field(default_factory=dict)


class CheckpointRemoved(Event):
    """Retention deleted an older checkpoint."""

    type: Literal["checkpoint_removed"] = "checkpoint_removed"
    step: int
    path: str


class Evaluation(Event):
    type: Literal["evaluation"] = "evaluation"
    step: int
    """0 = before the stage's first step."""
    benchmark: str
    num_prompts: int
    metrics: dict[str, float]
    """accuracy_greedy, accuracy_sampled, mean_length_tokens (greedy completions)."""


class EarlyStopping(Event):
    type: Literal["early_stopping"] = "early_stopping"
    step: int
    rule: Literal["literal", "plateau"]
    mode: Literal["off", "observe", "stop"]
    armed: bool
    smoothed_reward: float
    improvement: float | None
    """Relative, over the rule's span; null until there is one."""
    threshold: float
    patience: int
    patience_left: int
    would_stop: bool


class SelfTest(Event):
    type: Literal["self_test"] = "self_test"
    name: str
    passed: bool
    detail: str = ""


class Finding(Event):
    """What a detector concluded."""

    type: Literal["finding"] = "finding"
    step: int
    detector: str
    severity: Literal["info", "warning", "critical"]
    onset_step: int
    title: str
    evidence: str
    remedy: str
    resolved: bool = False
    """True when an earlier finding of this detector no longer holds."""


class WarningEvent(Event):
    type: Literal["warning"] = "warning"
    message: str


class Stopped(Event):
    """The engine obeyed a request to stop and can go on from its last checkpoint."""

    type: Literal["stopped"] = "stopped"
    step: int
    message: str = ""


class Finished(Event):
    type: Literal["finished"] = "finished"
    reason: Literal["finished", "early_stopped", "target_reached"]
    message: str = ""


class Failed(Event):
    type: Literal["failed"] = "failed"
    reason: str
    message: str
    traceback: str = ""


AnyEvent = Annotated[
    Started | StageStarted | Heartbeat | Metrics | Rollouts | Trained | WeightSync | CheckpointSaved | CheckpointRemoved
    | Evaluation | EarlyStopping | SelfTest | Finding | WarningEvent | Stopped | Finished | Failed,
    Field(discriminator="type"),
]  # fmt: skip
_ADAPTER: TypeAdapter[AnyEvent] = TypeAdapter(AnyEvent)


def parse_line(line: str | bytes) -> AnyEvent:
    """One journal line as its typed event. Raises pydantic.ValidationError when it is not one."""
    return _ADAPTER.validate_json(line)


def boot_clock_s() -> float:
    """Seconds since boot, suspend included; the same for every process of the host."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def split_nonfinite(values: Mapping[str, float]) -> tuple[dict[str, float | None], dict[str, NonFiniteKind]]:
    """Numbers as strict JSON allows them, and the kind of each that it does not."""
    finite: dict[str, float | None] = {}
    kinds: dict[str, NonFiniteKind] = {}
    for name, value in values.items():
        number = float(value)
        if math.isfinite(number):
            finite[name] = number
            continue
        finite[name] = None
        kinds[name] = "nan" if math.isnan(number) else "+inf" if number > 0 else "-inf"
    return finite, kinds


class Journal:
    """Appends events to an attempt's journal. One writer (rank 0); every line is flushed to the operating system.

    Raises FileExistsError when the folder has a journal already: an attempt never continues another's."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / JOURNAL_NAME
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "xb", buffering=0)  # noqa: SIM115 (close() closes it)
        self._seq = 0

    def append(self, type: str, *, stage: str | None = None, **payload: Any) -> AnyEvent:
        """Write one event and return it. Raises StorageFull when the disk refuses; then nothing of the line stays."""
        event = _ADAPTER.validate_python(
            {"seq": self._seq + 1, "time": datetime.now(UTC), "type": type, "stage": stage, **payload}
        )
        line = json.dumps(event.model_dump(mode="json"), ensure_ascii=False, allow_nan=False) + "\n"
        end = self._file.tell()
        try:
            _write_whole(self._file.fileno(), line.encode())
        except OSError as error:
            self._file.seek(end)  # or the next line would be glued to the torn one
            self._file.truncate()
            raise StorageFull(f"cannot append to {self.path}: {error.strerror}") from error
        self._seq += 1
        return event

    def metrics(self, step: int, values: Mapping[str, float], *, stage: str) -> None:
        finite, kinds = split_nonfinite(values)
        self.append("metrics", stage=stage, step=step, values=finite, nonfinite=kinds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()


class NoJournal(Journal):
    """The journal of ranks above 0: rank 0 alone writes, and says the same things."""

    def __init__(self) -> None:
        self._seq = 0

    def append(self, type: str, *, stage: str | None = None, **payload: Any) -> AnyEvent:
        """The event as it would have been; nothing is written."""
        self._seq += 1
        return _ADAPTER.validate_python(
            {"seq": self._seq, "time": datetime.now(UTC), "type": type, "stage": stage, **payload}
        )

    def close(self) -> None:
        """Nothing to close."""


def _write_whole(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def read_from(path: Path, offset: int = 0) -> Iterator[tuple[AnyEvent, int]]:
    """Whole events from byte `offset` on, each with the offset that follows it. A torn last line is left for later."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            yield parse_line(line), offset


def read(path: Path) -> list[AnyEvent]:
    """All whole events of a journal file or of an attempt's directory."""
    return [event for event, _ in read_from(path / JOURNAL_NAME if path.is_dir() else path)]
