"""The policy objective of whole rows, its gradient by central differences, and random batches to compare on."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from grpo_engine.model.logprobs import TokenLogprobs
from grpo_engine.training.objectives import PolicyObjective
from grpo_engine.types import TrainRow
from tests.unit.oracles import losses

STEP = 1e-6


@dataclass(frozen=True)
class Batch:
    """Rows and what a model says of their completion tokens, flat."""

    rows: list[TrainRow]
    policy: list[float]
    full: list[float]
    entropy: list[float]

    def logprobs(self) -> TokenLogprobs:
        """Leaf tensors, float64."""
        leaves = [torch.tensor(v, dtype=torch.float64).requires_grad_() for v in (self.policy, self.full, self.entropy)]
        return TokenLogprobs(*leaves, correct=torch.zeros(len(self.policy), dtype=torch.bool))


def random_batch(lengths: Sequence[int], seed: int, *, with_old: bool = True, spread: float = 0.5) -> Batch:
    """Rows of these lengths; ratios, masks and advantages that reach every branch of the formulas."""
    draw = random.Random(seed)

    def near(values: Sequence[float]) -> list[float]:
        return [value + draw.gauss(0, spread) for value in values]

    def flags(count: int) -> list[bool]:
        return [draw.random() < 0.7 for _ in range(count)]

    rows: list[TrainRow] = []
    flat: list[float] = []
    for length in lengths:
        policy = [draw.uniform(-4, -0.1) for _ in range(length)]
        flat += policy
        row = TrainRow(
            prompt_ids=[1],
            completion_ids=[2] * length,
            advantage=draw.gauss(0, 1),
            rollout_logprobs=near(policy),
            old_logprobs=near(policy) if with_old else None,
            ref_logprobs=near(policy),
            loss_mask=flags(length) if draw.random() < 0.7 else None,
            policy_mask=flags(length) if draw.random() < 0.5 else None,
            token_advantages=near([0.0] * length) if draw.random() < 0.3 else None,
        )
        rows.append(row)
    return Batch(rows, flat, near(flat), [draw.uniform(0, 3) for _ in flat])


def total_loss(batch: Batch, frozen: Sequence[float], objective: PolicyObjective) -> float:
    """Sum over trained tokens of token weight x loss. `frozen` [N]: the policy inside stop-gradients."""
    total, start = 0.0, 0
    for row in batch.rows:
        span = slice(start, start + len(row.completion_ids))
        own = Batch([row], batch.policy[span], batch.full[span], batch.entropy[span])
        total += row_loss(own, frozen[span], objective) * objective.normalizer.token_weight(row)
        start = span.stop
    return total


def row_loss(own: Batch, frozen: Sequence[float], objective: PolicyObjective) -> float:
    row, length = own.rows[0], len(own.policy)
    mask, chosen = row.loss_mask or [True] * length, row.policy_mask or [True] * length
    sampled, advantages = row.rollout_logprobs or [], row.token_advantages or [row.advantage] * length
    old = row.old_logprobs or (sampled if objective.old_logprobs == "sampler" else frozen)
    policy_losses = losses.row_losses(own.policy, frozen, old, advantages, mask, objective.loss)
    weights = losses.correction([o - s for o, s in zip(old, sampled, strict=True)], mask, objective.correction)
    kl, auxiliary = objective.kl, objective.auxiliary
    total = 0.0
    for t in range(length):
        if not mask[t]:
            continue
        if chosen[t]:
            total += policy_losses[t] * weights[t]
        if kl.weight and kl.place == "loss":
            change, frozen_change = own.policy[t] - old[t], frozen[t] - old[t]
            reference = (row.ref_logprobs or [])[t]
            total += kl.weight * losses.kl(own.full[t], reference, change, frozen_change, kl.estimator, kl.unbiased)
        total -= objective.entropy.bonus * own.entropy[t]
        if auxiliary.rows == "all" or row.advantage > 0:
            total -= auxiliary.weight * own.policy[t]
    return total


def slopes(function: Callable[[list[float]], float], at: Sequence[float]) -> list[float]:
    """Gradient by central differences."""
    found = []
    for index in range(len(at)):
        up, down = list(at), list(at)
        up[index] += STEP
        down[index] -= STEP
        found.append((function(up) - function(down)) / (2 * STEP))
    return found


def gradients(batch: Batch, objective: PolicyObjective) -> list[float]:
    """With respect to policy, full and entropy, one after another."""
    frozen, n = batch.policy, len(batch.policy)

    def loss(flat: list[float]) -> float:
        return total_loss(Batch(batch.rows, flat[:n], flat[n : 2 * n], flat[2 * n :]), frozen, objective)

    return slopes(loss, [*batch.policy, *batch.full, *batch.entropy])
