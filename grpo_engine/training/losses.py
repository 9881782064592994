"""Losses as pure functions of per-token tensors. All tensors are [N]: the completion tokens of a batch, flat.

Aggregation is decided in one place, `types.global_denominator`: the token mean over everything that one optimizer step
trains on (DAPO, arXiv:2503.14476 eq. 8; also GRPO's token mean). Losses here are sums; the learner divides each
micro-batch's sum by that one number, so the gradient depends neither on micro-batch size nor on accumulation, padding
or row order.

A masked token may hold NaN or infinity: it is replaced before `exp`, never multiplied by 0 afterwards.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where mask is True, 0 elsewhere; no NaN or gradient passes the mask."""
    return torch.where(mask, values, torch.zeros_like(values))


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    return masked(values, mask).sum()


class PolicyLoss(NamedTuple):
    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    """bool: ratio < 1 - clip_low and advantage < 0, so the token has no gradient."""
    clipped_high: Tensor
    """bool: ratio > 1 + clip_high and advantage > 0, so the token has no gradient."""


def clipped_policy_loss(log_ratio: Tensor, advantage: Tensor, *, clip_low: float, clip_high: float) -> PolicyLoss:
    """-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) per token. PPO, arXiv:1707.06347 eq. 7; bounds as DAPO.

    The log-ratio is not clamped: clamping would hide an exploded policy from the non-finite guard."""
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return PolicyLoss(
        loss=-torch.minimum(ratio * advantage, clipped * advantage),
        ratio=ratio,
        clipped_low=(ratio < 1 - clip_low) & (advantage < 0),
        clipped_high=(ratio > 1 + clip_high) & (advantage > 0),
    )


def k3(log_ratio: Tensor) -> Tensor:
    """exp(x) - x - 1 with x = log q - log p: unbiased, never negative estimate of KL(p || q) for tokens drawn from p.

    Schulman, http://joschu.net/blog/kl-approx.html; GRPO uses it with p = policy, q = reference. Written with expm1,
    which keeps its digits where the two distributions nearly agree."""
    return torch.expm1(log_ratio) - log_ratio
