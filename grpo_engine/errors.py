"""Errors the engine raises on purpose.

EngineError                  reason in the journal's `failed` event
├── InvalidConfig            invalid_config     a field's value cannot work; carries `problems`
├── DataError                data_error         a prompt source is missing, empty or malformed
├── RewardError              reward_error       a reward function cannot be loaded or breaks its contract
├── NonFinite                non_finite         loss or gradient stayed NaN or infinite
├── Diverged                 diverged           a guard rolled training back as often as it may
├── OutOfMemory              out_of_memory      one row alone does not fit the device
├── SelfTestFailed           self_test_failed   a check before training found the engine or model unfit
├── WeightSyncFailed         weight_sync_failed the sampler does not hold the trainer's weights after an update
├── RolloutUnavailable       rollout_unavailable  no sampling server is left, or vLLM is not installed
├── StorageFull              storage_full       the attempt's directory cannot be written
├── CheckpointInvalid        checkpoint_invalid a checkpoint is incomplete or its bytes changed
├── BrokenCollective         engine_crash       another rank ended; what it left in the folder is the cause
└── LeaseLost                worker_lost        another attempt owns the run; this engine must not step or write

torch's own out-of-memory errors are journaled as `out_of_memory` too. Anything else that escapes is our bug:
`engine_crash`, with its traceback.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a config, in words a person can act on.

    Example: Problem("stages.1.group_size", "1", "must be at least 2", "use 2 or more completions a prompt")
    """

    field: str
    """Dotted path in the config; empty when it concerns the whole."""
    value: str
    """The offending value as text, shortened to 200 characters."""
    message: str
    remedy: str

    def __str__(self) -> str:
        where = f"{self.field} = {self.value}" if self.field else "config"
        return f"{where}: {self.message}; {self.remedy}"


class EngineError(Exception):
    """Base of every error that has a typed reason. `reason` goes into the journal."""

    reason = "engine_crash"


class InvalidConfig(EngineError):
    """The config cannot run. `problems` lists every fault found, not only the first."""

    reason = "invalid_config"

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class DataError(EngineError):
    reason = "data_error"


class RewardError(EngineError):
    reason = "reward_error"


class NonFinite(EngineError):
    reason = "non_finite"


class Diverged(EngineError):
    reason = "diverged"


class OutOfMemory(EngineError):
    reason = "out_of_memory"


class SelfTestFailed(EngineError):
    reason = "self_test_failed"


class WeightSyncFailed(EngineError):
    reason = "weight_sync_failed"


class RolloutUnavailable(EngineError):
    reason = "rollout_unavailable"


class StorageFull(EngineError):
    reason = "storage_full"


class CheckpointInvalid(EngineError):
    reason = "checkpoint_invalid"


class LeaseLost(EngineError):
    reason = "worker_lost"


class BrokenCollective(EngineError):
    """A collective found that another rank has gone. The other's failure, not this one's, is the cause."""
