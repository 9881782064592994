"""The training claims on one GPU, in about eight minutes: `python -m benchmarks.gpu_training [--device cuda]`.

Update speed and peak memory of SmolLM2-135M against TRL on the same device and dtype, the bytes of the vocabulary's
log-probabilities, halving of the micro-batch when memory runs out, and bfloat16 against float32. Needs CUDA; the peer
as for `make bench-training` (COHORT_TRL_VENV names a ready one), left out with `--without-peer`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks import results
from benchmarks.results import Row

MINUTES = 8
OOM_SHARE = 0.06
"""Share of the device's memory that the process may use where it is to run out: about 8 GB of 139."""


def main(given: Sequence[str] | None = None) -> int:
    parsed = arguments(given)
    import torch

    if parsed.device == "cuda" and not torch.cuda.is_available():
        print(
            "error: --device cuda: this host has no usable CUDA device; run it where a GPU is at hand", file=sys.stderr
        )
        return 2
    started = time.monotonic()
    rows = [*out_of_memory(parsed.device), *bfloat16(parsed.device)]
    peer = None
    if not parsed.without_peer:
        from benchmarks.peers import trl_python

        peer = trl_python()
        rows += update(parsed.device, parsed.rounds)
    results.show(rows)
    extra: dict[str, object] = {"device": torch.cuda.get_device_name(0) if parsed.device == "cuda" else "cpu"}
    print(f"\nwritten: {results.write('gpu_training', rows, peer=peer, extra=extra)}")
    print(f"{(time.monotonic() - started) / 60:.1f} of {MINUTES} minutes")
    return 0 if all(row.met is not False for row in rows) else 1


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_training", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu only tries the script out")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each side")
    parser.add_argument("--without-peer", action="store_true", help="leave TRL out")
    return parser.parse_args(given)


def update(device: str, rounds: int) -> list[Row]:
    """update_135m and its memory, both sides on the device; more rows than on CPUs, so that the device is busy."""
    from benchmarks import update as updates
    from benchmarks.batches import long_rows, smollm2

    batch = long_rows(num_rows=64)
    shared = {"dtype": "bfloat16", "repetitions": 3}
    mine, theirs = updates.sides(batch, smollm2(), shared, rows=(8, 16), tokens=(8192, 20_000))
    mine = replace(mine, job=mine.job | {"device": device}, choices=without_threads(mine.choices))
    theirs = replace(theirs, job=theirs.job | {"cuda": device == "cuda"}, choices=without_threads(theirs.choices))
    measured = updates.compare(batch, mine, theirs, rounds)
    limit = f"{6 * 135e6 * batch.real_tokens / 1e12:.1f} TFLOP of matrix products a step on both sides"
    return [updates.rate_row("gpu_update_135m", measured, 1.6, limit, "64 rows, bfloat16 autocast; ")]


def without_threads(choices: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    return {name: values for name, values in choices.items() if name != "threads"}


def out_of_memory(device: str) -> list[Row]:
    """A device that is too small for the micro-batch: the step is repeated with half, and its gradient is the same."""
    from benchmarks.processes import in_process

    found = in_process("benchmarks.gpu_training:halve", {"device": device})
    told = "; ".join(found["notices"]) or "no notice"
    row = Row(
        "gpu_out_of_memory", found["difference"], None, "relative gradient difference",
        "float32 sums in another order", goal=1e-4, better="less",
        notes=f"limit {found['before']:,} tokens became {found['after']:,}; {told}",
    )  # fmt: skip
    return [row]


def halve(device: str) -> dict[str, Any]:
    """In a process of its own. On CPUs nothing runs out, and `after` equals `before`."""
    import torch

    from benchmarks.batches import demo_model, skewed
    from benchmarks.our_update import JOB, make_learner, rl_stage, train_row
    from benchmarks.update import STAGE, with_advantages
    from grpo_engine.config import FolderModel
    from grpo_engine.model.loading import load_policy
    from grpo_engine.types import global_denominator

    rows = [train_row(row) for row in with_advantages(skewed(num_rows=1024 if device == "cuda" else 64))]
    found = {}
    for budget in (4096, 1 << 22):
        job = {**JOB, "max_micro_batch_tokens": budget, "stage": STAGE, "device": device}
        stage = rl_stage(job)
        policy = load_policy(FolderModel(path=str(demo_model())), seed=0, dtype="float32", device=torch.device(device))
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(OOM_SHARE)
        learner = make_learner(policy, stage, job)
        learner.accumulate(rows, global_denominator(rows))
        flat = torch.cat([gradient.flatten().double() for gradient in learner.gradients().values()])
        found[budget] = (flat, learner.max_micro_batch_tokens, learner.take_notices())
    (small, _, _), (large, after, notices) = found[4096], found[1 << 22]
    difference = float((large - small).norm() / small.norm())
    return {"difference": difference, "before": 1 << 22, "after": after, "notices": notices}


def bfloat16(device: str) -> list[Row]:
    from benchmarks.processes import in_process

    cosine = in_process("benchmarks.gpu_training:precision", {"device": device})
    row = Row(
        "gpu_bfloat16", cosine, None, "cosine of gradients", "bfloat16 rounds by 0.4 %",
        goal=0.99, notes="bfloat16 autocast against float32, demo model, skewed batch",
    )  # fmt: skip
    return [row]


def precision(device: str) -> float:
    """Cosine between the gradients of the same batch under bfloat16 autocast and in float32."""
    import torch

    from benchmarks.batches import demo_model, skewed
    from benchmarks.our_update import JOB, make_learner, rl_stage, train_row
    from benchmarks.update import STAGE, with_advantages
    from grpo_engine.config import FolderModel
    from grpo_engine.model.loading import load_policy
    from grpo_engine.types import global_denominator

    rows = [train_row(row) for row in with_advantages(skewed(num_rows=32))]
    flats = []
    for dtype in ("bfloat16", "float32"):
        job = {**JOB, "stage": STAGE, "device": device, "dtype": dtype}
        policy = load_policy(FolderModel(path=str(demo_model())), seed=0, dtype=dtype, device=torch.device(device))
        learner = make_learner(policy, rl_stage(job), job)
        learner.accumulate(rows, global_denominator(rows))
        flats.append(torch.cat([gradient.flatten().double() for gradient in learner.gradients().values()]))
    return float(torch.nn.functional.cosine_similarity(flats[0], flats[1], dim=0))


if __name__ == "__main__":
    sys.exit(main())
