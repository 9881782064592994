"""The parity check's cases and batch: what both sides get, see `parity`."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.batches import BatchRow

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
