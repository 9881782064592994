"""What the sides of the rollout benchmark sample, the same for all of them: prompts and random streams from seeds.

Torch-free: every environment imports it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from benchmarks.standing import Job

JOB: dict[str, Any] = {
    "model": None,  # folder
    "num_prompts": 8,
    "group_size": 16,
    "prompt_tokens": 32,
    "vocabulary": [6, 56],  # prompt tokens are drawn from [first, second)
    "prompts": None,  # [[ids]] a measurement instead of drawn ones; measurement n takes entry n
    "streams": None,  # [[int]] one a completion; None = by measurement and place
    "max_new_tokens": 128,
    "temperature": 1.0,
    "top_k": 0,
    "min_p": 0.0,  # ours alone
    "ends": True,  # False: the end token ends nothing, so that every completion has max_new_tokens
    "dtype": "float32",
    "device": "cpu",
    "threads": 1,
    "ids": False,  # True: the answer holds the completions' token ids
}
"""A job's fields with their defaults. An order may replace any of them for one measurement."""


def given(job: Job, order: Job) -> Job:
    """All fields of one measurement."""
    return {**JOB, **job, **order}


def prompts(job: Job) -> list[list[int]]:
    """One list of token ids a prompt. Another measurement has other prompts, so that no side can have cached them."""
    if job["prompts"] is not None:
        chosen: list[list[int]] = job["prompts"][job["number"] % len(job["prompts"])]
        return chosen
    rng = random.Random(f"prompts/{job['number']}")
    low, high = job["vocabulary"]
    return [rng.choices(range(low, high), k=job["prompt_tokens"]) for _ in range(job["num_prompts"])]


def streams(job: Job) -> list[list[int]]:
    """One random stream a completion, prompt after prompt."""
    if job["streams"] is not None:
        named: list[list[int]] = job["streams"]
        return named
    num_prompts = len(prompts(job))
    return [[job["number"], prompt, index] for prompt in range(num_prompts) for index in range(job["group_size"])]


def timed(work: Callable[[], list[int]], finish: Callable[[], None] = lambda: None) -> Job:
    """Times of `work`, which returns the length of every completion; `finish` waits for the device."""
    wall, cpu = time.perf_counter(), time.process_time()
    lengths = work()
    finish()
    seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "tokens": sum(lengths), "lengths": lengths}
