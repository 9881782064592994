"""Claims update_skewed, update_135m and update_135m_memory: one optimizer step on the same batch, Cohort against TRL.

Each side's fastest settings are looked for first: 1 or 2 threads, and rows (TRL) or tokens (Cohort) of a micro-batch.
TRL's gradient checkpointing is off, its faster setting; Cohort's is off in update_skewed and on at 135 M, where speed
and memory are claimed of the same run. The rate counts real tokens: each row's prompt and
completion once. Advantages are equal (reward - group mean: Dr.GRPO's, TRL's scale_rewards=none); loss: DAPO's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import processes
from benchmarks.batches import Batch, demo_model, long_rows, skewed, smollm2
from benchmarks.processes import Job, Side
from benchmarks.results import Row, Spread, number

SETTINGS = {"loss_type": "dapo", "scale_rewards": "none", "beta": 0.0, "epsilon": 0.2, "epsilon_high": 0.28}
STAGE = {"loss": {"kind": "clip", "clip_low": 0.2, "clip_high": 0.28, "normalizer": "tokens"}}
GRADIENT_TOLERANCE = 1e-4
THREADS = (2, 1)


@dataclass(frozen=True, slots=True)
class Measured:
    """What one comparison found."""

    batch: Batch
    chosen: list[Job]
    """Settings of ours and of TRL's that were fastest."""
    results: list[list[dict[str, Any]]]
    gradient_difference: float
    """Relative, L2."""

    def rates(self, side: int) -> list[float]:
        """Real tokens a second, one a repetition."""
        return [self.batch.real_tokens / s for result in self.results[side] for s in result["seconds"]]

    def peaks(self, side: int) -> list[float]:
        """Peak resident bytes of each process."""
        return [float(result["memory"]["peak"]) for result in self.results[side]]


def sides(
    batch: Batch, model: Path, shared: Job, *, rows: Sequence[int], tokens: Sequence[int], checkpointing: str = "none"
) -> tuple[Side, Side]:
    """`rows` of a micro-batch for TRL to choose from, `tokens` for Cohort."""
    shared = {"model": str(model), "warmups": 1, **shared}
    mine = processes.ours(
        shared | {"rows": with_advantages(batch), "stage": STAGE, "gradient_checkpointing": checkpointing},
        {"max_micro_batch_tokens": tokens, "threads": THREADS},
    )
    theirs = processes.trl(
        shared | {"rows": batch.as_json(), "group_size": batch.group_size, "settings": SETTINGS},
        {"rows_per_micro_batch": rows, "threads": THREADS},
    )
    return mine, theirs


def with_advantages(batch: Batch) -> list[dict[str, object]]:
    rows = []
    for start in range(0, len(batch.rows), batch.group_size):
        group = batch.rows[start : start + batch.group_size]
        mean = fmean(row.reward for row in group)
        rows += [
            {"prompt_ids": r.prompt_ids, "completion_ids": r.completion_ids, "advantage": r.reward - mean}
            for r in group
        ]
    return rows


def compare(batch: Batch, mine: Side, theirs: Side, rounds: int) -> Measured:
    """Fastest settings, then A B A B …; the gradients of each side's first step are compared."""
    chosen = [processes.fastest(mine), processes.fastest(theirs)]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / "ours.safetensors", Path(folder) / "trl.safetensors"]
        for side, settings, file in zip((mine, theirs), chosen, files, strict=True):
            processes.run_job(side, {**settings, "repetitions": 0, "gradients": str(file)})
        difference = processes.relative_difference(*files)
    results = processes.alternate((mine, theirs), chosen, rounds)
    return Measured(batch, chosen, results, difference)


def update_skewed(rounds: int) -> list[Row]:
    batch = skewed()
    shared = {"dtype": "float32", "repetitions": 2}
    measured = compare(batch, *sides(batch, demo_model(), shared, rows=(4, 8, 16), tokens=(2048, 8192)), rounds)
    if not measured.gradient_difference <= GRADIENT_TOLERANCE:
        raise RuntimeError(f"update_skewed: gradients differ by {measured.gradient_difference:.2e} of their norm")
    padded = measured.results[1][0]["padded_tokens"]
    prompts = f"{len(batch.rows[0].prompt_ids)} prompt tokens, the same in each group of {batch.group_size}"
    limit = (
        f"TRL computes {padded:,} token positions for {batch.real_tokens:,} real ones: without any padding and at "
        f"TRL's speed a position the ratio would be {padded / batch.real_tokens:.1f}"
    )
    notes = f"{len(batch.rows)} rows, float32, h128 x 4 layers; {prompts}; "
    return [rate_row("update_skewed", measured, 2.5, limit, notes)]


def update_135m(rounds: int) -> list[Row]:
    batch = long_rows()
    shared = {"dtype": "bfloat16", "repetitions": 1}
    both = sides(batch, smollm2(), shared, rows=(2, 1, 4), tokens=(1024,), checkpointing="full")
    measured = compare(batch, *both, rounds)
    padded = measured.results[1][0]["padded_tokens"]
    prompt = len(batch.rows[0].prompt_ids)
    notes = (
        f"{len(batch.rows)} rows of 100 to 600 tokens, mean {batch.real_tokens / len(batch.rows):.0f}: {prompt} prompt "
        f"tokens, the same in each group of {batch.group_size}, the rest completion; bfloat16 autocast; Cohort "
        "recomputes layers (gradient_checkpointing full) in micro-batches of 1,024 tokens, which costs speed and saves "
        "memory; "
    )
    limit = (
        f"6 x 135 M x {batch.real_tokens:,} tokens = {6 * 135e6 * batch.real_tokens / 1e12:.1f} TFLOP of matrix "
        f"products on both sides; TRL computes {padded:,} positions for {batch.real_tokens:,} real ones"
    )
    speed = rate_row("update_135m", measured, 1.6, limit, notes)
    peaks = [Spread(measured.peaks(side)) for side in (0, 1)]
    memory = Row(
        "update_135m_memory",
        peaks[0].median,
        peaks[1].median,
        "peak resident bytes",
        "weights, gradients, AdamW's two moments: 16 bytes x 135 M = 2.15 GB on both sides, and each side's libraries",
        goal=0.7,
        better="less",
        spread={"ours": peaks[0].values, "peer": peaks[1].values},
        notes=f"of the processes of update_135m; ours {measured.chosen[0]}, TRL {measured.chosen[1]}",
    )
    return [speed, memory]


def rate_row(claim: str, measured: Measured, goal: float, limit: str, notes: str) -> Row:
    rates = [Spread(measured.rates(side)) for side in (0, 1)]
    return Row(
        claim,
        rates[0].median,
        rates[1].median,
        "real tokens/s",
        limit,
        goal=goal,
        spread={"ours": rates[0].values, "peer": rates[1].values},
        notes=f"{notes}ours {measured.chosen[0]}, TRL {measured.chosen[1]}; gradients differ by "
        f"{measured.gradient_difference:.1e} of their norm; peak memory {number(measured.peaks(0)[0] / 1e6)} MB "
        f"against {number(measured.peaks(1)[0] / 1e6)} MB",
    )
