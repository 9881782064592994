"""Supervised fine-tuning: the cold start."""

from __future__ import annotations

import time
from collections.abc import Callable

from grpo_engine.config import SFTStage
from grpo_engine.events import boot_clock_s
from grpo_engine.pipeline.shares import row_share
from grpo_engine.protocols import Learner, PromptSource
from grpo_engine.stages.context import Outcome, StageContext, log
from grpo_engine.stages.measure import resident_bytes
from grpo_engine.stages.update import step_values
from grpo_engine.types import Prompt, TrainRow, global_denominator

EncodeText = Callable[[Prompt], list[int]]
"""Token ids of a prompt's demonstration, end token included."""


def run_sft(
    context: StageContext, stage: SFTStage, source: PromptSource, learner: Learner, encode_demonstration: EncodeText
) -> Outcome:
    """Consumes demonstrations in order; waits for the lease before every step; produces one optimizer step each."""
    progress = context.progress
    context.start()
    context.control.synchronise()
    while progress.step < stage.num_steps and not context.control.stop_requested:
        values = _turn(context, stage, source, learner, encode_demonstration)
        context.metrics(progress.step, values)
        if progress.step % 20 == 0 or progress.step == stage.num_steps:
            log.info("%s step %d/%d loss %.4f", context.key, progress.step, stage.num_steps, values["loss"])
        if progress.step % stage.checkpoint.every_steps == 0 and progress.step < stage.num_steps:
            context.checkpoint()
        context.control.synchronise()
    return context.end("finished" if progress.step >= stage.num_steps else "stopped")


def _turn(
    context: StageContext, stage: SFTStage, source: PromptSource, learner: Learner, encode_demonstration: EncodeText
) -> dict[str, float]:
    """One optimizer step."""
    progress, ranks = context.progress, context.communicator
    started, started_boot = time.perf_counter(), boot_clock_s()
    prompts = source.take(progress.prompt_position, stage.rows_per_step)
    rows = [TrainRow(prompt.token_ids, encode_demonstration(prompt)) for prompt in prompts]
    num_tokens = sum(row.num_trained_tokens for row in rows)
    learner.accumulate(row_share(rows, ranks.rank, ranks.world_size), global_denominator(rows))
    context.control.wait_until_allowed()
    result = learner.step()
    progress.step += 1
    progress.policy_version = learner.policy_version
    progress.prompt_position += len(prompts)
    progress.num_tokens += num_tokens
    for notice in learner.take_notices():
        context.warn(notice)
    seconds = time.perf_counter() - started
    context.trained(result.applied, started_boot)
    return step_values(result) | {
        "throughput/tokens_per_s": num_tokens / seconds,
        "time/step_s": seconds,
        "memory/rss_bytes": resident_bytes(),
    }
