"""Claims decode_small, decode_short and decode_shared_prompt: our decoder against `transformers.generate`; decode_in_c
and decode_skewed: against itself without C and without compaction. One thread and float32 on both sides."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.batches import SKEWED_LONGEST, skewed, smollm2
from benchmarks.results import Row
from benchmarks.rollout_models import countdown, endless, parameters
from benchmarks.rollout_setup import Setup, generate, ours, rate_row, rates, worse
from benchmarks.standing import Job, Standing, take_turns
from grpo_engine.rollout.native.compiled import SWITCH

GEMM_GFLOPS = 73
"""float32 matrix products of one thread of the machine in research/deepspeed-trl.md."""
SIZES = ("0.86m", "3.4m")
CANDIDATES = 4096
"""Random streams from which those with the wanted lengths are taken."""


def decode_small(setup: Setup) -> list[Row]:
    """8 prompts of 128 tokens x 16 completions of 256."""
    job = {"prompt_tokens": setup.size(128, 16), "max_new_tokens": setup.size(256, 8)}
    return [_both_sizes("decode_small", setup, job, goal=3.5)]


def decode_short(setup: Setup) -> list[Row]:
    """8 prompts of 32 tokens x 16 completions of 128."""
    job = {"prompt_tokens": 32, "max_new_tokens": setup.size(128, 8)}
    return [_both_sizes("decode_short", setup, job, goal=1.6)]


def decode_shared_prompt(setup: Setup) -> list[Row]:
    """SmolLM2-135M, 4 groups of 16, prompts of 200 tokens, 64 new ones."""
    job = {
        "num_prompts": setup.size(4, 2), "group_size": setup.size(16, 2), "prompt_tokens": setup.size(200, 20),
        "max_new_tokens": setup.size(64, 3), "vocabulary": [100, 49_000],
    }  # fmt: skip
    return [_against_generate("decode_shared_prompt", setup, smollm2(), job, goal=2.0)]


def decode_in_c(setup: Setup) -> list[Row]:
    """The work of decode_small, attention in C against attention by matrix products."""
    job = {
        "model": str(endless("0.86m")), "device": setup.device, "ends": False,
        "prompt_tokens": setup.size(128, 16), "max_new_tokens": setup.size(256, 8),
    }  # fmt: skip
    in_c = ours(job)
    by_products = replace(in_c, name="products", command=["env", f"{SWITCH}=0", *in_c.command])
    mine, theirs = take_turns([in_c, by_products], setup.repetitions, warm_up={"max_new_tokens": 4})
    return [
        rate_row(
            "decode_in_c", rates(mine), rates(theirs),
            "what attention takes with products; reading each row's own keys and values at the speed of memory stays",
            notes="0.86 M parameters, float32, one thread.",
        )
    ]  # fmt: skip


def _both_sizes(claim: str, setup: Setup, job: Job, goal: float) -> Row:
    rows = [_against_generate(claim, setup, endless(size), job, goal) for size in SIZES]
    return worse(claim, rows, [f"{size.upper()} parameters" for size in SIZES])


def _against_generate(claim: str, setup: Setup, model: Path, job: Job, goal: float) -> Row:
    job = {"model": str(model), "device": setup.device, "ends": False, **job}
    mine, theirs = take_turns([ours(job), generate(job)], setup.repetitions, warm_up={"max_new_tokens": 4})
    return rate_row(
        claim, rates(mine), rates(theirs), decode_limit(model, job), goal=goal,
        notes="float32, one thread, full distribution at temperature 1; our repacking and log-probabilities are in our "
        "time, generate's scores are kept and not read.",
    )  # fmt: skip


def decode_limit(model: Path, job: Job) -> str:
    """What one token costs at least, and how often each side must read a prompt."""
    count = parameters(model)
    rate = GEMM_GFLOPS * 1e9 / (2 * count)
    size = job.get("group_size", 16)
    return (
        f"matrix products of {2 * count / 1e6:,.1f} MFLOP a token: {rate:,.0f} tokens/s at {GEMM_GFLOPS} GFLOP/s of "
        f"one thread; a prompt computed once serves {size} completions, generate computes and keeps it for each"
    )


# ---------------------------------------------------------------- lengths
def decode_skewed(setup: Setup) -> list[Row]:
    """128 rows whose lengths have p50 60 and p99 1,000, against the same rows kept until the longest has ended."""
    lengths = wanted_lengths(setup)
    job = {
        "model": str(countdown()), "device": setup.device, "prompts": skewed_prompts(len(lengths) // 16),
        "max_new_tokens": SKEWED_LONGEST,
    }  # fmt: skip
    with Standing(ours(job)) as process:
        streams = matching_streams(process, lengths)
    compact = {**job, "streams": streams}
    whole = {
        **compact,
        "ends": False,
        "max_new_tokens": max(lengths),
        "rollout": {"backend": "torch", "sub_batches": False},
    }
    sides = [ours(compact), ours(whole, "without compaction")]
    mine, static = take_turns(sides, setup.repetitions, warm_up={"max_new_tokens": 4})
    wasted = max(lengths) * len(lengths) / mine[0]["tokens"]
    useful = [mine[0]["tokens"] / answer["seconds"] for answer in static]
    found = sorted(mine[0]["lengths"])
    return [
        rate_row(
            "decode_skewed", rates(mine), useful,
            f"without compaction every row takes the {max(lengths):,} steps of the longest: {wasted:.1f} times the "
            "tokens that count; steps with few rows cost more a row",
            goal=1.6,
            notes=f"lengths p50 {found[len(found) // 2]}, p99 {found[round(len(found) * 0.99) - 1]:,}, longest "
            f"{found[-1]:,}, not to be known from the prompts; the peer is our decoder on the same requests with every "
            "row kept to the end, its tokens after an end not counted. float32, one thread, 0.86 M parameters in "
            "layers, 1,026 tokens of vocabulary.",
        )
    ]  # fmt: skip


def wanted_lengths(setup: Setup) -> list[int]:
    """Completion lengths of `batches.skewed`, in its order."""
    lengths = [len(row.completion_ids) for row in skewed().rows]
    return [min(40, length) for length in lengths[:32]] if setup.small else lengths


def skewed_prompts(num_prompts: int) -> list[list[list[int]]]:
    """One measurement's prompts of 40 tokens, which end with `start`."""
    rng = random.Random(0)
    start = SKEWED_LONGEST + 1
    return [[[*rng.choices(range(1, SKEWED_LONGEST), k=39), start] for _ in range(num_prompts)]]


def matching_streams(process: Standing, lengths: Sequence[int]) -> list[list[int]]:
    """For each length a random stream of its own whose completion is about as long: its first token tells.

    Example: matching_streams(process, [60, 1000]) == [[0, 17], [0, 2203]]"""
    streams = [[0, index] for index in range(CANDIDATES)]
    order: dict[str, Any] = {"max_new_tokens": 1, "ids": True, "number": 0, "group_size": CANDIDATES}
    first = process.ask(prompts=[skewed_prompts(1)[0]], streams=streams, **order)["ids"]
    free = {index: ids[0] + 1 for index, ids in enumerate(first)}
    chosen: list[list[int]] = []
    for length in lengths:
        best = min(free, key=lambda index: (abs(free[index] - length), index))
        del free[best]
        chosen.append(streams[best])
    return chosen
