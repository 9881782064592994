"""What the learner minimises: sums over the trained tokens of a micro-batch, and sums of the statistics beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from grpo_engine.model.logprobs import TokenLogprobs
from grpo_engine.training import losses
from grpo_engine.types import TrainRow


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over trained tokens; the learner divides `loss` by the step's denominator and `stats` by the token count."""

    loss: Tensor
    """Scalar with gradient."""
    stats: dict[str, Tensor]
    """Scalars, float64, detached."""


class Objective(Protocol):
    @property
    def temperature(self) -> float: ...

    def __call__(self, logprobs: TokenLogprobs, rows: Sequence[TrainRow]) -> Sums:
        """`logprobs` holds the rows' completion tokens in order."""
        ...


@dataclass(frozen=True, slots=True)
class SupervisedObjective:
    """Cross entropy of the demonstration's tokens; `loss` in nats a token."""

    temperature: float = 1.0

    def __call__(self, logprobs: TokenLogprobs, rows: Sequence[TrainRow]) -> Sums:
        mask = loss_mask(rows, logprobs.full)
        loss = losses.masked_sum(-logprobs.full, mask)
        return Sums(loss, _stats(mask, {"loss": -logprobs.full, "sft/token_accuracy": logprobs.correct}))


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """GRPO: clipped policy loss + kl_weight x k3 KL to the reference, summed over trained tokens.

    The ratio compares the distributions that were sampled from (truncated when kept ids are given); KL compares the
    full ones. Without `old_logprobs` a row's ratio is taken against `rollout_logprobs`."""

    clip_low: float
    clip_high: float
    kl_weight: float
    temperature: float
    track_kl: bool

    def __call__(self, logprobs: TokenLogprobs, rows: Sequence[TrainRow]) -> Sums:
        """Raises ValueError when a row lacks what the objective needs or its lists differ in length."""
        policy = logprobs.policy
        mask = loss_mask(rows, policy)
        sampled = _column(rows, "rollout_logprobs", lambda row: row.rollout_logprobs, policy)
        old = _column(rows, "old_logprobs", lambda row: row.old_logprobs or row.rollout_logprobs, policy)
        advantage = _column(rows, "advantage", lambda row: [row.advantage] * len(row.completion_ids), policy)
        terms = losses.clipped_policy_loss(
            losses.masked(policy - old, mask), advantage, clip_low=self.clip_low, clip_high=self.clip_high
        )
        loss = terms.loss
        gap = losses.masked((policy - sampled).detach().double(), mask)
        stats = {
            "sampler/logprob_gap_k3": losses.k3(gap),
            "policy/entropy": logprobs.entropy,
            "policy/ratio_mean": terms.ratio,
            "policy/clip_low_share": terms.clipped_low,
            "policy/clip_high_share": terms.clipped_high,
            "policy/clip_share": terms.clipped_low | terms.clipped_high,
        }
        if self.track_kl or self.kl_weight > 0:
            reference = _column(rows, "ref_logprobs", lambda row: row.ref_logprobs, policy)
            stats["policy/kl"] = kl = losses.k3(losses.masked(reference - logprobs.full, mask))
            # Without a weight no gradient may pass, not even 0 x inf.
            loss = loss + self.kl_weight * kl if self.kl_weight > 0 else loss
        return Sums(losses.masked_sum(loss, mask), _stats(mask, {"loss": loss} | stats))


def loss_mask(rows: Sequence[TrainRow], like: Tensor) -> Tensor:
    """[N] bool: True = trained token."""
    return _column(rows, "loss_mask", lambda row: row.loss_mask or [True] * len(row.completion_ids), like).bool()


def _column(
    rows: Sequence[TrainRow], name: str, values: Callable[[TrainRow], Sequence[float] | None], like: Tensor
) -> Tensor:
    """[N] the rows' values one after another, in the type and on the device of `like`."""
    flat: list[float] = []
    for index, row in enumerate(rows):
        row_values = values(row)
        if row_values is None:
            raise ValueError(f"row {index} has no {name}, which the objective needs")
        if len(row_values) != len(row.completion_ids):
            raise ValueError(f"row {index}: {len(row_values)} values of {name} for {len(row.completion_ids)} tokens")
        flat.extend(row_values)
    return torch.tensor(flat, dtype=like.dtype, device=like.device)


@torch.no_grad()
def _stats(mask: Tensor, values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: losses.masked_sum(tensor.detach().double(), mask) for name, tensor in values.items()}
