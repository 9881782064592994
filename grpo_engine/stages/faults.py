"""What reward parts could not judge, told to people: a finding once for each kind of fault, a warning for silence."""

from __future__ import annotations

from grpo_engine.diagnostics.detectors import FindingFields
from grpo_engine.pipeline.synchronous import Batch
from grpo_engine.stages.context import StageContext, log
from grpo_engine.types import RewardFault

SILENT = "judged nothing"
"""Kind of fault of a part that abstained on a whole batch without saying that anything is wrong."""
MAX_DETECTOR = 60
"""Characters of a detector's name in the database."""


def tell_faults(context: StageContext, batch: Batch, told: set[tuple[str, str]]) -> None:
    """Journal the faults of a batch whose (part, kind) is not among `told`, and add them to it."""
    for fault in batch.faults:
        if (fault.part, fault.kind) not in told:
            finding = _finding(context.progress.step, fault)
            context.journal.append("finding", stage=context.key, **finding.fields())
            log.warning("%s %s", finding.title, finding.evidence)
        told |= {(fault.part, fault.kind), (fault.part, SILENT)}
    _warn_of_silence(context, batch, told)


def _finding(step: int, fault: RewardFault) -> FindingFields:
    return FindingFields(
        step=step,
        detector=f"reward_fault/{fault.part}"[:MAX_DETECTOR],
        severity="warning",
        onset_step=step,
        title=f"The reward part {fault.part} could not judge ({fault.kind}).",
        evidence=fault.message,
        remedy="What it did not judge counts as abstained. Correct it and start a new run, or go on without it.",
    )


def _warn_of_silence(context: StageContext, batch: Batch, told: set[tuple[str, str]]) -> None:
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    for parts in zip(*(rollout.parts for rollout in rollouts), strict=True):
        name = parts[0].name
        if (name, SILENT) not in told and all(part.value is None for part in parts):
            told.add((name, SILENT))
            context.warn(f"reward part {name} judged none of {len(parts)} completions: {parts[0].explanation}")
