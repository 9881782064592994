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

import torch
from safetensors.torch import load_file, save_file

from benchmarks import processes, results
from benchmarks.batches import BatchRow, tiny_llama
from benchmarks.peers import PeerMissing, bench_home, trl_python

TOLERANCE = 1e-5
TEMPERATURE = 0.8
GROUPS, GROUP_SIZE, ACCUMULATION = 8, 4, 4
LONGEST = 40
BETA = 0.05
LOW, HIGH = 0.2, 0.25
CISPO_CAP = 1.25
"""TRL's epsilon_high of cispo: the cap itself."""
MIN_CLIPPED = 0.2
Rows = list[BatchRow]


@dataclass(frozen=True, slots=True)
class Case:
    """One loss on both sides."""

    name: str
    trl: dict[str, Any]
    stage: dict[str, Any]
    sequence_ratio: bool = False
    """Old log-probabilities are pushed a row at a time, so that whole sequences clip."""
    truncated_rows: bool = True
    divisor: str = "cohort"
    """cohort: the engine's own; rows: every row counts, masked ones too; micro_batch: each call's own tokens."""


def clip(normalizer: str, **more: Any) -> dict[str, Any]:
    return {"kind": "clip", "clip_low": LOW, "clip_high": HIGH, "normalizer": normalizer, **more}


KL = {"weight": BETA, "estimator": "k3", "unbiased": True}
GSPO = {"kind": "gspo", "clip_low": LOW, "clip_high": HIGH}
SEQUENCE = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
CASES = [
    Case("grpo", {"loss_type": "grpo"}, {"loss": clip("sequences"), "kl": KL}, divisor="rows"),
    Case("grpo, no row masked", {"loss_type": "grpo"}, {"loss": clip("sequences"), "kl": KL}, truncated_rows=False),
    Case("dr_grpo", {"loss_type": "dr_grpo", "scale_rewards": "none"}, {"loss": clip("constant"), "kl": KL}),
    Case("dapo", {"loss_type": "dapo"}, {"loss": clip("tokens"), "kl": KL}),
    Case(
        "dapo, plain k3",
        {"loss_type": "dapo", "use_bias_correction_kl": False},
        {"loss": clip("tokens"), "kl": {**KL, "unbiased": False}},
    ),
    Case("bnpo", {"loss_type": "bnpo"}, {"loss": clip("tokens"), "kl": KL}, divisor="micro_batch"),
    Case(
        "cispo",
        {"loss_type": "cispo", "epsilon_high": CISPO_CAP},
        {"loss": {"kind": "cispo", "clip_low": None, "clip_high": CISPO_CAP - 1}, "kl": KL},
    ),
    Case(  # TRL puts the sequence's ratio on each token's KL when it corrects the bias; Cohort the token's
        "sequence level",
        {**SEQUENCE, "use_bias_correction_kl": False},
        {"loss": GSPO, "kl": {**KL, "unbiased": False}},
        sequence_ratio=True,
        divisor="rows",
    ),
    Case(
        "sequence level, no KL, no row masked",
        {**SEQUENCE, "beta": 0.0},
        {"loss": GSPO},
        sequence_ratio=True,
        truncated_rows=False,
    ),
]


# ---------------------------------------------------------------- the batch
def make_rows(rng: random.Random, *, truncated_rows: bool) -> Rows:
    """Groups of ragged rows; the first two groups have equal rewards, the others two winners and two losers."""
    rows = []
    for group in range(GROUPS):
        prompt = rng.choices(range(6, 56), k=rng.randint(2, 13))
        for index in range(GROUP_SIZE):
            cut = truncated_rows and rng.random() < 0.2
            length = LONGEST if cut else rng.randint(1, LONGEST - 1)
            completion = rng.choices(range(6, 56), k=length)
            if not cut:
                completion[-1] = 2
            reward = 1.0 if group < 2 else float(index < 2) + 0.1 * rng.random()
            rows.append(BatchRow(prompt, completion, reward, ends=not cut))
    return rows


def push(rng: random.Random, logprobs: list[float], winner: bool | None, *, whole_row: bool) -> list[float]:
    """Old log-probabilities: most tokens of a winner end above the upper bound, of a loser below the lower one; the
    rest stay near, or go the way that does not clip."""
    away = 0.0 if winner is None else (1.0 if winner else -1.0)
    row_shift = away * 0.5 if rng.random() < 0.8 else 0.02

    def shift() -> float:
        if whole_row:
            return row_shift + rng.gauss(0, 0.05)
        kind = rng.random()
        if kind < 0.75:
            return away * rng.uniform(0.35, 0.8)
        return -away * rng.uniform(0.1, 0.5) if kind < 0.9 else rng.gauss(0, 0.05)

    return [value - shift() for value in logprobs]


def clipped_shares(rows: Rows, policy: list[list[float]], advantages: list[float], case: Case) -> tuple[float, float]:
    """Shares of the trained tokens whose ratio lies beyond the bound and is therefore cut, low and high."""
    low = high = total = 0
    for row, now, advantage in zip(rows, policy, advantages, strict=True):
        if not row.ends:
            continue
        assert row.old_logprobs is not None
        gaps = [new - old for new, old in zip(now, row.old_logprobs, strict=True)]
        if case.sequence_ratio:
            gaps = [sum(gaps) / len(gaps)] * len(gaps)
        ratios = torch.tensor(gaps).exp()
        total += len(gaps)
        if case.trl["loss_type"] == "cispo":
            high += int((ratios > CISPO_CAP).sum())
        elif advantage:
            low += int((ratios < 1 - LOW).sum()) if advantage < 0 else 0
            high += int((ratios > 1 + HIGH).sum()) if advantage > 0 else 0
    return low / total, high / total


@torch.no_grad()
def plain_logprobs(folder: Path, weights: Path | None, rows: Rows) -> list[list[float]]:
    """Log-probabilities by the library's own forward pass, a row at a time."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if weights is not None:
        model.load_state_dict(load_file(weights), strict=False)
    found = []
    for row in rows:
        ids = torch.tensor([row.prompt_ids + row.completion_ids])
        logits = model(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : -1] / TEMPERATURE
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(row.completion_ids)[:, None])
        found.append(chosen.squeeze(1).tolist())
    return found


def perturbed_weights(folder: Path, path: Path) -> Path:
    """The policy: the reference's weights with noise, so that KL is not zero."""
    torch.manual_seed(1)
    weights = load_file(folder / "model.safetensors")
    save_file({name: value + 0.01 * torch.randn_like(value) for name, value in weights.items()}, path)
    return path


# ---------------------------------------------------------------- both sides
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
    return processes.run_job(processes.trl(job), {}), file


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
    return processes.run_job(processes.ours(job), {}), file


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
