"""Training on one batch: its minibatches, its epochs, and what each optimizer step did."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_engine.config import RLStage
from grpo_engine.events import boot_clock_s
from grpo_engine.pipeline.shares import row_share, split_evenly
from grpo_engine.pipeline.synchronous import Batch, num_judged, train_rows
from grpo_engine.protocols import Learner
from grpo_engine.stages.context import StageContext
from grpo_engine.stages.measure import batch_reward, dropped_groups, sampled_kl
from grpo_engine.stages.parts import RLParts
from grpo_engine.stages.recovery import guard
from grpo_engine.stages.sync import rest, send_weights
from grpo_engine.types import Group, Normalizer, StepResult, TrainRow, global_denominator


@dataclass(frozen=True, slots=True)
class Minibatch:
    """What one optimizer step trains on; `rows` is this rank's share."""

    groups: Sequence[Group]
    rows: list[TrainRow]
    denominator: float
    num_tokens: int
    """Trained tokens over all ranks."""


def normalizer(stage: RLStage) -> Normalizer:
    return Normalizer(stage.loss.normalizer, constant_tokens=stage.sampling.max_new_tokens)


def train_on_batch(context: StageContext, stage: RLStage, parts: RLParts, batch: Batch) -> dict[str, float]:
    """All optimizer steps of the batch; returns the last one's values, the others' are journaled here.

    A minibatch without any usable group steps without moving the weights. After a rollback the rest of the batch is
    left alone: another policy sampled it."""
    progress = context.progress
    started = time.perf_counter()
    rest(parts)
    staleness = float(parts.learner.policy_version - batch.policy_version)
    minibatches = [_minibatch(context, stage, parts.learner, groups) for groups in _split(batch.groups, stage)]
    values: dict[str, float] = {}
    num_tokens = 0
    reward = batch_reward(batch.groups)
    for minibatch in minibatches * stage.epochs:
        if values:
            context.metrics(progress.step, values)
        result = _optimize(context, parts, batch, minibatch)
        values = step_values(result)
        num_tokens += minibatch.num_tokens
        kl = None if "policy/kl" in values else sampled_kl(minibatch.groups)
        if kl is not None:
            values["policy/kl"] = kl
        if guard(context, stage, parts, result, kl, reward) or progress.step >= stage.num_steps:
            break
        reward = None  # seen once
    values |= send_weights(context, parts)
    progress.prompt_position = batch.next_position
    progress.smoothed_reward = batch.smoothed_reward
    for notice in parts.learner.take_notices():
        context.warn(notice)
    seconds = time.perf_counter() - started
    if stage.guards.action == "rollback":
        values["guards/rollbacks"] = float(parts.guards.rollbacks)
        values["optimizer/rate_scale"] = stage.guards.rate_factor**parts.guards.rollbacks
    return values | {
        "staleness/max": staleness,
        "time/train_s": seconds,
        "throughput/train_tokens_per_s": num_tokens / seconds,
    }


def _split(groups: Sequence[Group], stage: RLStage) -> list[Sequence[Group]]:
    return [[groups[index] for index in part] for part in split_evenly(len(groups), stage.minibatches)]


def _minibatch(context: StageContext, stage: RLStage, learner: Learner, groups: Sequence[Group]) -> Minibatch:
    rows = train_rows(groups, mask_truncated=stage.mask_truncated, old_from_sampler=stage.old_logprobs == "sampler")
    ranks = context.communicator
    return Minibatch(
        groups=groups,
        rows=learner.prepare(row_share(rows, ranks.rank, ranks.world_size)),
        denominator=global_denominator(rows, normalizer(stage), num_sampled=num_judged(groups)),
        num_tokens=sum(row.num_trained_tokens for row in rows),
    )


def _optimize(context: StageContext, parts: RLParts, batch: Batch, minibatch: Minibatch) -> StepResult:
    progress, learner = context.progress, parts.learner
    started_boot = boot_clock_s()
    context.control.wait_until_allowed()
    if minibatch.rows:
        learner.accumulate(minibatch.rows, minibatch.denominator)
    context.control.wait_until_allowed()
    try:
        result = learner.step()
    finally:
        progress.step += 1  # a step that raises was counted by the learner's schedule too
    progress.policy_version = learner.policy_version
    progress.num_tokens += minibatch.num_tokens
    context.trained(result.applied, started_boot, batches=[batch.number], dropped=dropped_groups(minibatch.groups))
    return result


def step_values(result: StepResult) -> dict[str, float]:
    """What an optimizer step did, by names of the metric catalogue."""
    return result.stats | {
        "optimizer/gradient_norm": result.gradient_norm,
        "optimizer/learning_rate": result.learning_rate,
        "optimizer/skipped_steps": float(not result.applied),
    }
