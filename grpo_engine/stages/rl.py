"""Reinforcement learning: GRPO.

One step: collect a batch, write it down, train on it, judge the run, evaluate, checkpoint.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from grpo_engine.config import RLStage
from grpo_engine.diagnostics.detectors import Detectors
from grpo_engine.diagnostics.early_stopping import EarlyStopper
from grpo_engine.evaluation.held_out import HeldOutEvaluation
from grpo_engine.events import boot_clock_s
from grpo_engine.pipeline.synchronous import Batch, SynchronousPipeline, train_rows
from grpo_engine.protocols import Learner, Sampler
from grpo_engine.rollout_files import write_batch
from grpo_engine.stages.context import Outcome, StageContext, log
from grpo_engine.stages.measure import batch_metrics, dropped_groups, resident_bytes
from grpo_engine.types import global_denominator


@dataclass(frozen=True, slots=True)
class RLParts:
    """The four modules and the judges, built by the composition root."""

    pipeline: SynchronousPipeline
    sampler: Sampler
    learner: Learner
    evaluation: HeldOutEvaluation
    early_stopper: EarlyStopper
    detectors: Detectors


def run_rl(context: StageContext, stage: RLStage, parts: RLParts) -> Outcome:
    """Consumes prompts in order; waits for the lease before every step; produces rollouts, steps and verdicts."""
    progress = context.progress
    context.start()
    if progress.step == 0 and not context.control.stop_requested:
        _evaluate(context, parts, step=0)
    warned: set[str] = set()
    while progress.step < stage.num_steps and not context.control.stop_requested:
        started = time.perf_counter()
        batch = parts.pipeline.next_batch(progress.batch + 1, progress.prompt_position, progress.policy_version)
        _write_rollouts(context, stage, batch)
        _warn_of_abstention(context, batch, warned)
        values = batch_metrics(batch.groups) | _train(context, stage, parts, batch)
        seconds = time.perf_counter() - started
        sampled = sum(len(rollout.completion.token_ids) for group in batch.groups for rollout in group.rollouts)
        values |= {f"time/{name}_s": spent for name, spent in batch.seconds.items()}
        values |= {
            "throughput/tokens_per_s": sampled / seconds,
            "time/step_s": seconds,
            "memory/rss_bytes": resident_bytes(),
        }
        context.metrics(progress.step, values)
        if _judge(context, parts, values):
            _evaluate(context, parts, step=progress.step)
            return context.end("early_stopped")
        last = progress.step == stage.num_steps
        if last or progress.step % stage.evaluation.every_steps == 0:
            _evaluate(context, parts, step=progress.step)
        if not last and progress.step % stage.checkpoint.every_steps == 0:
            context.checkpoint()
    return context.end("finished" if progress.step >= stage.num_steps else "stopped")


def _write_rollouts(context: StageContext, stage: RLStage, batch: Batch) -> None:
    """Everything that may train a token is on disk before it does."""
    path, relative = context.rollout_path(batch.number)
    about: dict[str, Any] = {
        "batch": batch.number,
        "stage": context.key,
        "policy_version": batch.policy_version,
        "advantage": {"form": "grpo", "normalize_std": stage.normalize_std},
    }
    context.control.wait_until_allowed()
    write_batch(path, batch.groups, about)
    context.progress.batch = batch.number
    context.journal.append(
        "rollouts", stage=context.key, batch=batch.number, path=relative, num_groups=len(batch.groups),
        num_completions=sum(len(group.rollouts) for group in batch.groups), policy_version=batch.policy_version,
    )  # fmt: skip


def _warn_of_abstention(context: StageContext, batch: Batch, warned: set[str]) -> None:
    """Tell once of a reward part that judged nothing of a whole batch: most often a user's function that raises."""
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    for parts in zip(*(rollout.parts for rollout in rollouts), strict=True):
        name = parts[0].name
        if name not in warned and all(part.value is None for part in parts):
            warned.add(name)
            message = f"reward part {name} judged none of {len(parts)} completions: {parts[0].explanation}"
            context.journal.append("warning", stage=context.key, message=message)
            log.warning("%s", message)


def _train(context: StageContext, stage: RLStage, parts: RLParts, batch: Batch) -> dict[str, float]:
    """One optimizer step on the batch; a batch without any usable group steps without moving the weights."""
    progress, learner = context.progress, parts.learner
    started, started_boot = time.perf_counter(), boot_clock_s()
    rows = train_rows(batch.groups, mask_truncated=stage.mask_truncated)
    staleness = learner.policy_version - batch.policy_version
    context.control.wait_until_allowed()
    stats = learner.accumulate(rows, global_denominator(rows)) if rows else {}
    context.control.wait_until_allowed()
    result = learner.step()
    parts.sampler.load_weights(learner.iter_full_weights(), learner.policy_version)
    progress.step += 1
    progress.policy_version = learner.policy_version
    progress.prompt_position = batch.next_position
    progress.num_tokens += sum(row.num_trained_tokens for row in rows)
    context.trained(result.applied, started_boot, batches=[batch.number], dropped=dropped_groups(batch.groups))
    return stats | {
        "staleness/max": float(staleness),
        "optimizer/gradient_norm": result.gradient_norm,
        "optimizer/learning_rate": result.learning_rate,
        "optimizer/skipped_steps": float(not result.applied),
        "time/train_s": time.perf_counter() - started,
    }


def _judge(context: StageContext, parts: RLParts, values: dict[str, float]) -> bool:
    """Findings and early stopping; True when the stage must end now."""
    step = context.progress.step
    for finding in parts.detectors.update(step, values):
        context.journal.append("finding", stage=context.key, **finding.fields())
        log.warning("finding at step %d: %s", step, finding.title)
    for message in context.control.messages():
        if "early_stopping" in message:
            parts.early_stopper.override(message["early_stopping"])
    decision = parts.early_stopper.update(step, values.get("reward/mean"))
    context.progress.early_stopping = parts.early_stopper.state()
    context.progress.detectors = parts.detectors.state()
    if decision is not None:
        context.journal.append("early_stopping", stage=context.key, **decision.fields())
    if "reward/mean" in values:
        context.latest_metrics["reward/mean"] = values["reward/mean"]
    log.info(
        "%s step %d/%d reward %.3f length %.1f %.2f s", context.key, step, context.num_steps,
        values.get("reward/mean", float("nan")), values["completion/mean_length_tokens"], values["time/step_s"],
    )  # fmt: skip
    return decision is not None and decision.stops


def _evaluate(context: StageContext, parts: RLParts, *, step: int) -> None:
    if not parts.evaluation.prompts:  # a file of which nothing is held out
        return
    context.promise(120, "evaluating on held-out prompts")
    result = parts.evaluation.run(parts.sampler)
    context.journal.append(
        "evaluation", stage=context.key, step=step, benchmark=parts.evaluation.name,
        num_prompts=len(parts.evaluation.prompts), metrics=result,
    )  # fmt: skip
    context.latest_metrics |= result
    log.info("%s step %d held-out %s", context.key, step, " ".join(f"{k} {v:.3f}" for k, v in result.items()))
