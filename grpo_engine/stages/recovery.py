"""What follows an alarm: a finding, and where the config says so a return to the last good checkpoint."""

from __future__ import annotations

from typing import Literal

from grpo_engine.config import RLStage
from grpo_engine.diagnostics.detectors import FindingFields
from grpo_engine.errors import Diverged, NonFinite
from grpo_engine.stages.context import StageContext, log
from grpo_engine.stages.guards import Alarm
from grpo_engine.stages.parts import RLParts
from grpo_engine.stages.reward_watch import BatchReward
from grpo_engine.stages.sync import send_weights
from grpo_engine.training.checkpoint import TRAINER
from grpo_engine.types import StepResult

REMEDY = "Lower optimizer.learning_rate, add warmup_steps, or set guards.action to rollback."


def guard(
    context: StageContext, stage: RLStage, parts: RLParts, result: StepResult,
    sampled_kl: float | None = None, reward: BatchReward | None = None,
) -> bool:  # fmt: skip
    """Check one optimizer step; True when weights were rolled back. A report is told once an episode."""
    was_alarmed = parts.guards.alarmed
    alarm = parts.guards.check(result, sampled_kl, reward)
    _judge_checkpoint(context, parts, result)
    rolled_back = False
    if alarm is not None and stage.guards.action == "rollback" and context.last_good is not None:
        recover(context, stage, parts, alarm)
        rolled_back = True
    elif alarm is not None and not was_alarmed:
        _tell(context, alarm, "warning", REMEDY)
    context.progress.guards = parts.guards.state()
    return rolled_back


def _judge_checkpoint(context: StageContext, parts: RLParts, result: StepResult) -> None:
    """What the step says of the checkpoint before it: its KL and reward were measured on those weights, and neither a
    spike nor a low reward may go on."""
    if parts.guards.alarmed:
        context.unproven = None
    elif result.applied and result.stats and not parts.guards.doubtful:
        context.prove()


def rescue(context: StageContext, stage: RLStage, parts: RLParts, error: NonFinite) -> None:
    """Roll back from numbers that are not finite; raises `error`, told as a finding, where there is no way back."""
    alarm = Alarm("guard_nonfinite", "Numbers are no longer finite", str(error))
    if stage.guards.action == "rollback" and context.last_good is not None:
        recover(context, stage, parts, alarm)
        return
    if stage.guards.action != "off":
        _tell(context, alarm, "critical", REMEDY)
    raise error


def recover(context: StageContext, stage: RLStage, parts: RLParts, alarm: Alarm) -> None:
    """Restore weights and optimizer of the last good checkpoint and go on with a lower rate; steps go on counting.

    Raises Diverged when the stage was rolled back max_rollbacks times already."""
    good, guards = context.last_good, parts.guards
    assert good is not None
    where = f"{good.name} is the last good checkpoint"
    if guards.rollbacks >= stage.guards.max_rollbacks:
        _tell(context, alarm, "critical", f"Lower optimizer.learning_rate or add warmup_steps. {where}.")
        raise Diverged(
            f"{alarm.title.lower()} at step {context.progress.step} after {guards.rollbacks} rollbacks "
            f"(guards.max_rollbacks): {alarm.evidence} {where}; lower optimizer.learning_rate"
        )
    parts.learner.roll_back(good / TRAINER, stage.guards.rate_factor)
    send_weights(context, parts)
    guards.rolled_back()
    context.unproven, context.saved_step = None, -1  # what this step's checkpoint holds is no longer the policy
    context.progress.guards = guards.state()
    share = stage.guards.rate_factor**guards.rollbacks
    done = f"Rolled back to {good.name}; the learning rate is {share:.3g} of the configured one from now on."
    _tell(context, alarm, "critical", f"{done} If it comes again, lower optimizer.learning_rate.")


def _tell(context: StageContext, alarm: Alarm, severity: Literal["warning", "critical"], remedy: str) -> None:
    step = context.progress.step
    finding = FindingFields(step, alarm.detector, severity, step, alarm.title, alarm.evidence, remedy)
    context.journal.append("finding", stage=context.key, **finding.fields())
    log.warning("finding at step %d: %s (%s)", step, alarm.title, alarm.evidence)
