"""The rollout claims on one GPU, in under eight minutes: `python -m benchmarks.gpu_rollout [--device cuda]`.

The same sides as `benchmarks.rollout`, their models and samples on the device, with fewer repetitions; claim ids begin
with `gpu_`. Needs CUDA. Peers as for `make bench-rollout` (COHORT_TRL_VENV and COHORT_VLLM_VENV name ready ones; vLLM's
must be built for CUDA), left out with `--without-peers`. Two servers want two GPUs and are left out.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from benchmarks import peers, results, rollout
from benchmarks.results import Row

MINUTES = 8
OWN = ("decode_small", "decode_short", "decode_shared_prompt", "decode_skewed", "mtp_long", "mtp_large_batch")
WITH_PEERS = ("whole_step", "whole_step_bf16", "decode_vs_vllm", "vllm_overhead", "weight_update")


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_rollout", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu only tries the script out")
    parser.add_argument("--only", default=None, help="claims of benchmarks.rollout, separated by commas")
    parser.add_argument("--repetitions", type=int, default=2, help="measurements of each side")
    parser.add_argument("--without-peers", action="store_true", help="leave TRL and vLLM out")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that everything runs")
    parsed = parser.parse_args(given)
    offered = OWN if parsed.without_peers else (*OWN, *WITH_PEERS)
    parsed.claims = parsed.only.split(",") if parsed.only else list(offered)
    if unknown := sorted(set(parsed.claims) - set(offered)):
        parser.error(f"--only {unknown[0]}: no such claim here; choose among {', '.join(offered)}")
    return parsed


def main(given: Sequence[str] | None = None) -> int:
    parsed = arguments(given)
    import torch

    if parsed.device == "cuda" and not torch.cuda.is_available():
        print(
            "error: --device cuda: this host has no usable CUDA device; run it where a GPU is at hand", file=sys.stderr
        )
        return 2
    from benchmarks.rollout_setup import Setup

    started = time.monotonic()
    setup = Setup(repetitions=parsed.repetitions, small=parsed.small, device=parsed.device)
    rows, failed, trl = rollout.measure(parsed.claims, setup)
    rows = [told(row) for row in rows]
    results.show(rows)
    if not parsed.small:
        extra: dict[str, object] = {"device": torch.cuda.get_device_name(0) if parsed.device == "cuda" else "cpu"}
        print(f"\nwritten: {results.write('gpu_rollout', rows, peer=trl, extra=extra)}")
    print(f"{(time.monotonic() - started) / 60:.1f} of {MINUTES} minutes")
    return 1 if failed else 0


def told(row: Row) -> Row:
    """The row under its GPU id, without the goal: goals are stated for one CPU thread."""
    return replace(row, claim=f"gpu_{row.claim}", goal=None)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (peers.PeerMissing, RuntimeError) as error:
        sys.exit(f"error: {error}")
