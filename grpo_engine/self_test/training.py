"""Checks that sample, score and differentiate a few rows with the stage's own parts.

Nothing is left behind: gradients are dropped, prompts and random streams of training are not consumed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from grpo_engine.config import SamplingConfig
from grpo_engine.protocols import Sampler
from grpo_engine.self_test.checks import Check
from grpo_engine.types import Completion, Prompt, SampleRequest, TrainRow, global_denominator

SELF_TEST_STREAM = 1 << 21
"""Keeps the self-test's random streams apart from training's and evaluation's."""
NUM_PROMPTS = 2
COMPLETIONS = 2
MAX_NEW_TOKENS = 32
GRADIENT_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
"""Difference between two ways of summing the same gradient, relative to its norm."""
CRITIC = "value."
"""What the names of a critic's parameters begin with."""
GAP_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
"""Largest difference of one token's log-probability between sampler and trainer, nats."""
MEAN_GAP_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}
"""The same, mean over tokens."""


class Differentiable(Protocol):
    """What the self-test needs of a learner beside protocols.Learner."""

    def logprobs(self, rows: Sequence[TrainRow]) -> list[list[float]]: ...

    def accumulate(self, batch: Sequence[TrainRow], global_denominator: float, *, rehearsal: bool) -> None:
        """With `rehearsal` the policy gets its gradient while a critic warms up too."""
        ...

    def discard(self) -> dict[str, float]:
        """Drop the accumulated gradient; this rank's stats of it."""
        ...

    def gradients(self) -> dict[str, torch.Tensor]:
        """By parameter; a critic's begin with `value.`."""
        ...


def sample_rows(sampler: Sampler, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int) -> list[TrainRow]:
    """A few rows as training would make them, with made-up advantages of both signs."""
    chosen = [prompt for prompt in prompts[:NUM_PROMPTS] for _ in range(COMPLETIONS)]
    requests = [
        SampleRequest(prompt.token_ids, (seed, SELF_TEST_STREAM, index), f"self-test-{prompt.id}")
        for index, prompt in enumerate(chosen)
    ]
    short = sampling.model_copy(update={"max_new_tokens": min(MAX_NEW_TOKENS, sampling.max_new_tokens)})
    completions = sampler.sample(requests, short)
    return [
        _row(prompt, completion, 1.0 - 1.5 * (index % 2))
        for index, (prompt, completion) in enumerate(zip(chosen, completions, strict=True))
    ]


def _row(prompt: Prompt, completion: Completion, advantage: float) -> TrainRow:
    size = len(completion.token_ids)
    return TrainRow(
        prompt.token_ids, completion.token_ids, advantage, completion.logprobs, None, completion.full_logprobs,
        completion.kept_ids, token_advantages=[advantage] * size, returns=[advantage] * size, old_values=[0.0] * size,
    )  # fmt: skip


def check_sampler(learner: Differentiable, rows: Sequence[TrainRow], dtype: str) -> Check:
    """Sampler and trainer give the sampled tokens the same log-probabilities, truncation included."""
    pairs = zip(learner.logprobs(rows), rows, strict=True)
    gaps = [abs(a - b) for ours, row in pairs for a, b in zip(ours, row.rollout_logprobs or [], strict=True)]
    largest, mean = max(gaps), math.fsum(gaps) / len(gaps)
    passed = largest <= GAP_TOLERANCE[dtype] and mean <= MEAN_GAP_TOLERANCE[dtype]  # False for NaN too
    detail = (
        f"log-probabilities of {len(gaps)} sampled tokens differ by {largest:.2g} nats at most, {mean:.2g} on average; "
        f"{GAP_TOLERANCE[dtype]:g} and {MEAN_GAP_TOLERANCE[dtype]:g} are allowed in {dtype}"
    )
    return Check("sampler_and_trainer_agree", passed, detail)


def check_ratio(learner: Differentiable, rows: Sequence[TrainRow], dtype: str) -> Check:
    """The forward pass that is differentiated gives what the one that scored gave: an untouched policy has ratio 1."""
    frozen = [replace(row, old_logprobs=old) for row, old in zip(rows, learner.logprobs(rows), strict=True)]
    learner.accumulate(frozen, global_denominator(frozen), rehearsal=True)
    stats = learner.discard()
    mean, largest = stats.get("policy/ratio_mean", math.nan), stats.get("policy/ratio_max", math.nan)
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    passed = abs(mean - 1) <= tolerance and abs(largest - 1) <= tolerance
    return Check("on_policy_ratio", passed, f"mean ratio {mean:.8g}, largest {largest:.8g}; both must be 1")


def check_gradient(learner: Differentiable, rows: Sequence[TrainRow], denominator: float, dtype: str) -> Check:
    """All rows at once and one row at a time in reverse give the same gradient, of the policy and of a critic each."""
    learner.accumulate(rows, denominator, rehearsal=True)
    whole = _signature(learner)
    learner.discard()
    for row in reversed(rows):
        learner.accumulate([row], denominator, rehearsal=True)
    parts = _signature(learner)
    learner.discard()
    policy = [name for name in whole if not name.startswith(CRITIC)]
    if whole.keys() != parts.keys() or not any(whole[name][0] for name in policy):
        return Check("gradient_invariance", False, "no parameter of the policy got a gradient from a real batch")
    critic = [name for name in whole if name.startswith(CRITIC)]
    found = [_difference(whole, parts, names) for names in (policy, critic)]
    worst, norm = max(found, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0])
    detail = (
        f"{len(rows)} rows at once and one by one: gradients differ by {worst:.1e} of their norm {norm:.3g}; "
        f"{GRADIENT_TOLERANCE[dtype]:g} is allowed in {dtype}"
    )
    return Check("gradient_invariance", worst <= GRADIENT_TOLERANCE[dtype], detail)


Signature = dict[str, tuple[float, float]]


def _difference(one: Signature, other: Signature, names: Sequence[str]) -> tuple[float, float]:
    """Of the gradients of `names`: how far apart they are, relative to the norm of `one`, and that norm.

    Both may be 0: values that moved beyond the clip have no gradient."""
    norm = math.sqrt(math.fsum(one[name][0] for name in names))
    shift = math.sqrt(math.fsum((one[name][1] - other[name][1]) ** 2 for name in names))
    change = abs(norm - math.sqrt(math.fsum(other[name][0] for name in names)))
    worst = max(shift, change)
    return (worst / norm if worst and norm else math.inf if worst else 0.0), norm


def _signature(learner: Differentiable) -> Signature:
    """Per parameter: squared norm, and the projection on a fixed direction of unit length; no copy of the gradient."""
    signature = {}
    for name, gradient in learner.gradients().items():
        flat = gradient.flatten().float()
        direction = torch.arange(flat.numel(), device=flat.device, dtype=torch.float32).cos_()
        projection = torch.dot(flat, direction) / direction.norm()
        signature[name] = (float(torch.dot(flat, flat)), float(projection))
    return signature
