"""Reinforcement learning: one loop for GRPO and its relatives, and for PPO.

One turn: collect a batch, write it down, train on it (minibatches x epochs optimizer steps), judge the run, evaluate,
checkpoint. Every rank takes every turn.
"""

from __future__ import annotations

import time
from typing import Any

from grpo_engine.config import RLStage
from grpo_engine.config_gates import learned_names
from grpo_engine.errors import NonFinite
from grpo_engine.pipeline.synchronous import Batch
from grpo_engine.rollout_files import write_batch
from grpo_engine.stages.agreement import learned_spread
from grpo_engine.stages.context import Outcome, StageContext, crossed, log
from grpo_engine.stages.faults import tell_faults
from grpo_engine.stages.measure import batch_metrics, resident_bytes, sampler_metrics
from grpo_engine.stages.parts import RLParts
from grpo_engine.stages.recovery import rescue
from grpo_engine.stages.update import train_on_batch


def run_rl(context: StageContext, stage: RLStage, parts: RLParts) -> Outcome:
    """Consumes prompts in order; waits for the lease before every step; produces rollouts, steps and verdicts."""
    progress = context.progress
    context.start()
    context.control.synchronise()
    if progress.step == 0 and not context.control.stop_requested:
        _evaluate(context, parts, step=0)
        if stage.guards.action == "rollback":
            context.checkpoint()  # what the first rollback may need
    told: set[tuple[str, str]] = set()
    while progress.step < stage.num_steps and not context.control.stop_requested:
        before = progress.step
        stops = False
        try:
            stops = _turn(context, stage, parts, told)
        except NonFinite as error:
            rescue(context, stage, parts, error)
        last = stops or progress.step >= stage.num_steps
        if last or crossed(before, progress.step, stage.evaluation.every_steps):
            _evaluate_or_roll_back(context, stage, parts)
        if stops:
            return context.end("early_stopped", good=not parts.guards.alarmed)
        if not last and crossed(before, progress.step, stage.checkpoint.every_steps):
            context.checkpoint(good=not parts.guards.alarmed)
        context.control.synchronise()
    outcome: Outcome = "finished" if progress.step >= stage.num_steps else "stopped"
    return context.end(outcome, good=not parts.guards.alarmed)


def _turn(context: StageContext, stage: RLStage, parts: RLParts, told: set[tuple[str, str]]) -> bool:
    """One batch from prompts to verdicts; True when early stopping ends the stage. `told`: faults of rewards that need
    not be told again."""
    progress = context.progress
    started = time.perf_counter()
    parts.sampler.take_metrics()  # what evaluation and probe did is not the step's
    batch = parts.pipeline.next_batch(
        progress.batch + 1, progress.prompt_position, progress.policy_version, progress.smoothed_reward
    )
    _write_rollouts(context, stage, batch)
    tell_faults(context, batch, told)
    values = batch_metrics(batch.groups) | batch.counts | sampler_metrics(parts.sampler, context.communicator)
    values |= learned_spread(batch.groups, learned_names(stage.rewards))
    if parts.lengths is not None:
        progress.lengths = parts.lengths.state()
    values |= train_on_batch(context, stage, parts, batch)
    seconds = time.perf_counter() - started
    sampled = sum(len(rollout.completion.token_ids) for group in batch.groups for rollout in group.rollouts)
    values |= {f"time/{name}_s": spent for name, spent in batch.seconds.items()}
    values |= {
        "throughput/tokens_per_s": sampled / seconds,
        "time/step_s": seconds,
        "memory/rss_bytes": resident_bytes(),
    }
    if batch.num_too_long:
        values["groups/too_long"] = float(batch.num_too_long)
    if stage.advantage.smooth_rewards and batch.smoothed_reward is not None:
        values["reward/smoothed"] = batch.smoothed_reward
    context.metrics(progress.step, values)
    return _judge(context, parts, values)


def _write_rollouts(context: StageContext, stage: RLStage, batch: Batch) -> None:
    """Everything that may train a token is on disk before it does."""
    path, relative = context.rollout_path(batch.number)
    kl = stage.kl.model_dump(mode="json", include={"weight", "estimator", "place"})
    about: dict[str, Any] = {
        "batch": batch.number,
        "stage": context.key,
        "policy_version": batch.policy_version,
        "advantage": {"form": stage.advantage.kind, **stage.advantage.model_dump(mode="json"), "kl": kl},
    }
    context.control.wait_until_allowed()
    if context.writes:
        write_batch(path, batch.groups, about)
    context.progress.batch = batch.number
    context.journal.append(
        "rollouts", stage=context.key, batch=batch.number, path=relative, num_groups=len(batch.groups),
        num_completions=sum(len(group.rollouts) for group in batch.groups), policy_version=batch.policy_version,
    )  # fmt: skip


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


def _evaluate_or_roll_back(context: StageContext, stage: RLStage, parts: RLParts) -> None:
    """Evaluation may be the first to sample from a policy that broke in the step before."""
    try:
        _evaluate(context, parts, step=context.progress.step)
    except NonFinite as error:
        rescue(context, stage, parts, error)
        _evaluate(context, parts, step=context.progress.step)


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
