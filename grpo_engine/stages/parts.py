"""What the composition root builds for a stage of reinforcement learning."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_engine.diagnostics.detectors import Detectors
from grpo_engine.diagnostics.early_stopping import EarlyStopper
from grpo_engine.evaluation.held_out import HeldOutEvaluation
from grpo_engine.pipeline.synchronous import SynchronousPipeline
from grpo_engine.protocols import Learner, Sampler
from grpo_engine.stages.guards import Guards


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
