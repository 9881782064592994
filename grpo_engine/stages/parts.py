"""What the composition root builds for a stage of reinforcement learning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from grpo_engine.diagnostics.detectors import Detectors
from grpo_engine.diagnostics.early_stopping import EarlyStopper
from grpo_engine.evaluation.held_out import HeldOutEvaluation
from grpo_engine.pipeline.synchronous import SynchronousPipeline
from grpo_engine.protocols import Learner, Sampler
from grpo_engine.stages.guards import Guards
from grpo_engine.stages.probe import SyncProbe


class Lengths(Protocol):
    """A memory that a resumed run must go on with."""

    def state(self) -> dict[str, Any]:
        """JSON values."""
        ...


@dataclass(frozen=True, slots=True)
class RLParts:
    """The four modules and the judges."""

    pipeline: SynchronousPipeline
    sampler: Sampler
    learner: Learner
    evaluation: HeldOutEvaluation
    early_stopper: EarlyStopper
    detectors: Detectors
    guards: Guards
    probe: SyncProbe | None = None
    """None: the sampler reads the learner's own weights."""
    lengths: Lengths | None = None
    """What the sampler has learned of completion lengths; None where its order follows the prompts alone."""
