"""Loss and gradient of Cohort against TRL 1.16.0, within 1e-5: `make bench-parity` (about two minutes).

One float32 tiny Llama and one batch: ragged prompts and completions, completions cut by the token limit and masked,
groups without variance, four micro-batches, temperature 0.8, KL to a reference of other weights. Old log-probabilities
are the policy's own, pushed so that at least a fifth of the trained tokens clip on each side (asserted). TRL makes
masks, advantages, reference log-probabilities, shuffle and split itself (see trl_update.py); Cohort gets TRL's
advantages, and the reference's and old log-probabilities from a plain forward pass of its own.

What TRL decides otherwise than Cohort is handed over in the case (`rows counted`, `micro-batch's own denominator`) or
not at all; docs/training.md lists it with the reasons.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from benchmarks import processes, results
from benchmarks.batches import BatchRow, tiny_llama
from benchmarks.parity_cases import (
    ACCUMULATION,
    BETA,
    CASES,
    GROUP_SIZE,
    HIGH,
    LONGEST,
    LOW,
    MIN_CLIPPED,
    TEMPERATURE,
    Case,
    Rows,
    clipped_shares,
    make_rows,
    perturbed_weights,
    plain_logprobs,
    push,
)
from benchmarks.peers import PeerMissing, bench_home, trl_python

TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    loss_difference: float
    gradient_difference: float
    """L2 norm of the difference / norm."""
    largest_difference: float
    """Of any single gradient entry, absolute."""
    clipped: tuple[float, float]

    @property
    def worst(self) -> float:
        return max(self.loss_difference, self.gradient_difference, self.largest_difference)


def run_case(case: Case, model: Path, policy_weights: Path, scratch: Path) -> Outcome:
    rng = random.Random(7)
    rows = make_rows(rng, truncated_rows=case.truncated_rows)
    policy = plain_logprobs(model, policy_weights, rows)
    winners = [None if i < 2 * GROUP_SIZE else i % GROUP_SIZE < 2 for i in range(len(rows))]
    rows = [
        replace(row, old_logprobs=push(rng, now, winner, whole_row=case.sequence_ratio))
        for row, now, winner in zip(rows, policy, winners, strict=True)
    ]
    theirs, their_file = run_trl(case, rows, model, policy_weights, scratch)
    kept = load_file(their_file)
    advantages, order = kept["advantages"].tolist(), kept["order"].tolist()
    clipped = clipped_shares(rows, policy, advantages, case)
    one_sided = case.trl["loss_type"] == "cispo"  # TRL's has no lower bound
    assert clipped[1] >= MIN_CLIPPED, f"{case.name}: clipped {clipped}"
    assert one_sided or clipped[0] >= MIN_CLIPPED, f"{case.name}: clipped {clipped}"
    reference = plain_logprobs(model, None, rows)
    mine, my_file = run_cohort(case, rows, advantages, order, reference, model, policy_weights, scratch)
    return Outcome(
        case.name,
        abs(mine["loss"] - theirs["loss"]),
        processes.relative_difference(my_file, their_file),
        largest_difference(my_file, their_file),
        clipped,
    )


def run_trl(case: Case, rows: Rows, model: Path, policy_weights: Path, scratch: Path) -> tuple[dict[str, Any], Path]:
    file = scratch / "trl.safetensors"
    settings = {
        "beta": BETA,
        "epsilon": LOW,
        "epsilon_high": HIGH,
        "mask_truncated_completions": True,
        **case.trl,
    }
    job = {
        "model": str(model),
        "policy_weights": str(policy_weights),
        "rows": [row_json(row) for row in rows],
        "group_size": GROUP_SIZE,
        "rows_per_micro_batch": len(rows) // ACCUMULATION,
        "temperature": TEMPERATURE,
        "max_completion_length": LONGEST,
        "repetitions": 1,
        "warmups": 0,
        "settings": settings,
        "gradients": str(file),
    }
    return processes.run_job(processes.trl(job, {}), {}), file


def run_cohort(
    case: Case, rows: Rows, advantages: list[float], order: list[int], reference: list[list[float]],
    model: Path, policy_weights: Path, scratch: Path,
) -> tuple[dict[str, Any], Path]:  # fmt: skip
    file = scratch / "cohort.safetensors"
    given = [
        {**row_json(row), "advantage": advantage, "ref_logprobs": ref, "loss_mask": [row.ends] * len(ref)}
        for row, advantage, ref in zip(rows, advantages, reference, strict=True)
    ]
    size = len(rows) // ACCUMULATION
    parts = [order[start : start + size] for start in range(0, len(rows), size)]
    job = {
        "model": str(model),
        "policy_weights": str(policy_weights),
        "rows": given,
        "parts": parts,
        "denominators": divisors(case, rows, parts),
        "stage": case.stage,
        "temperature": TEMPERATURE,
        "max_completion_length": LONGEST,
        "max_micro_batch_tokens": 200,
        "repetitions": 1,
        "warmups": 0,
        "gradients": str(file),
    }
    return processes.run_job(processes.ours(job, {}), {}), file


def divisors(case: Case, rows: Rows, parts: list[list[int]]) -> list[float] | None:
    """What each accumulate call divides by, where TRL counts otherwise than the engine."""
    if case.divisor == "rows":
        return [float(len(rows))] * len(parts)
    if case.divisor == "micro_batch":
        trained = [[len(rows[i].completion_ids) for i in part if rows[i].ends] for part in parts]
        return [float(max(1, sum(lengths)) * len(parts)) for lengths in trained]
    return None


def row_json(row: BatchRow) -> dict[str, Any]:
    names = ("prompt_ids", "completion_ids", "reward", "old_logprobs")
    return {name: getattr(row, name) for name in names}


def largest_difference(first: Path, second: Path) -> float:
    a, b = load_file(first), load_file(second)
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def main() -> int:
    model = tiny_llama("parity-h64x2", seed=3, hidden_size=64, num_layers=2, num_heads=4, intermediate_size=96)
    outcomes = measure(model)
    show(outcomes)
    rows = [
        results.Row(
            claim=f"parity {outcome.name}",
            ours=outcome.worst,
            peer=None,
            unit="largest difference",
            goal=TOLERANCE,
            better="less",
            limit="float32: 6e-8 a rounding, some 1e3 of them in a gradient entry",
            notes=f"loss {outcome.loss_difference:.1e}, gradient {outcome.gradient_difference:.1e} of its norm, "
            f"clipped low {outcome.clipped[0]:.0%}, high {outcome.clipped[1]:.0%} of the trained tokens",
        )
        for outcome in outcomes
    ]
    print(f"\nwritten: {results.write('parity', rows, peer=trl_python())}")
    return 0 if all(row.met for row in rows) else 1


def measure(model: Path, cases: list[Case] | None = None, told: Callable[[str], None] = print) -> list[Outcome]:
    outcomes = []
    with tempfile.TemporaryDirectory(dir=bench_home()) as folder:
        policy_weights = perturbed_weights(model, Path(folder) / "policy.safetensors")
        for case in cases or CASES:
            outcomes.append(run_case(case, model, policy_weights, Path(folder)))
            told(f"  {case.name}: {outcomes[-1].worst:.1e}")
    return outcomes


def show(outcomes: list[Outcome]) -> None:
    print(f"\n{'case':<40}{'loss':>10}{'gradient':>10}{'largest':>10}{'clipped low / high':>22}")
    for outcome in outcomes:
        differences = (outcome.loss_difference, outcome.gradient_difference, outcome.largest_difference)
        shares = f"{outcome.clipped[0]:.0%} / {outcome.clipped[1]:.0%}"
        print(f"{outcome.name:<40}" + "".join(f"{value:>10.1e}" for value in differences) + f"{shares:>22}")
    print(f"\nwithin {TOLERANCE}: {all(outcome.worst <= TOLERANCE for outcome in outcomes)}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (PeerMissing, json.JSONDecodeError) as error:
        sys.exit(f"error: {error}")
