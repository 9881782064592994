"""Policy and value losses as pure functions of flat tensors [N]: the completion tokens of the rows, one after another.

A loss gives one number a token. What becomes of them is decided elsewhere and once: each is multiplied by its row's
`types.Normalizer.token_weight`, summed, and divided by `types.global_denominator`. So the gradient depends neither on
micro-batch size nor on accumulation, ranks, padding, packing or row order. Hence a loss function may look across the
tokens of a row, never across rows.

Log-ratios are not clamped (verl and OpenRLHF clamp to ±20): a policy that exploded must reach the non-finite guard, not
train on with zero gradient. A masked token may hold NaN or infinity: it is replaced before `exp`, never multiplied by 0
afterwards, so it passes neither value nor gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_engine.config_training import CISPOLoss, ClipLoss, GSPOLoss


class LossInputs(NamedTuple):
    """[N] each; log-probabilities in nats, under the distribution that was sampled from."""

    policy: Tensor
    """With gradient."""
    old: Tensor
    """What the ratio compares with; no gradient."""
    advantage: Tensor
    mask: Tensor
    """bool: True = trained token."""
    row_N: Tensor
    """int64: index of the token's row."""
    num_rows: int


class LossTerms(NamedTuple):
    """[N] each; 0 (False) at masked tokens, ratio 1."""

    loss: Tensor
    ratio: Tensor
    """exp(policy - old) of the token, or of its sequence in gspo."""
    clipped_low: Tensor
    """bool: the lower bound took effect: no gradient (clip, gspo), or a raised weight (cispo)."""
    clipped_high: Tensor
    """bool: the upper bound took effect, dual clip included."""


# ---------------------------------------------------------------- sums that a masked token cannot enter
def masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where mask is True, 0 elsewhere; no NaN or gradient passes the mask."""
    return torch.where(mask, values, torch.zeros_like(values))


def row_sums(values: Tensor, row_N: Tensor, num_rows: int) -> Tensor:
    """[num_rows] sums of each row's values."""
    return values.new_zeros(num_rows).index_add(0, row_N, values)


def row_means(values: Tensor, mask: Tensor, row_N: Tensor, num_rows: int) -> Tensor:
    """[num_rows] means over each row's trained tokens; 0 in rows without one. `values` are masked already."""
    count = row_sums(mask.to(values.dtype), row_N, num_rows)
    return row_sums(values, row_N, num_rows) / count.clamp(min=1)


# ---------------------------------------------------------------- losses
def clip_loss(inputs: LossInputs, config: ClipLoss) -> LossTerms:
    """-min(ρ A, clip(ρ, 1 - clip_low, 1 + clip_high) A) with ρ = exp(policy - old). PPO, arXiv:1707.06347 eq. 7; bounds
    apart from each other as in DAPO, arXiv:2503.14476.

    Dual clip (arXiv:1912.09729): with A < 0 at most dual_clip |A|, so that a token whose ratio ran away upwards stops
    being pushed. TRL's `delta` is the same number as long as it exceeds 1 + clip_high."""
    ratio = masked(inputs.policy - inputs.old, inputs.mask).exp()
    return _clipped_surrogate(ratio, inputs, config.clip_low, config.clip_high, config.dual_clip)


def gspo_loss(inputs: LossInputs, config: GSPOLoss) -> LossTerms:
    """Clipped surrogate on the sequence's ratio s = exp(mean of the row's policy - old), the geometric mean of its
    tokens' ratios. GSPO, arXiv:2507.18071 eq. 5-7.

    The gradient passes through the mean, so every token of a row gets the same: s A / |y|. Each token carries its row's
    loss; the normaliser `sequences` then gives the paper's mean over sequences. Token advantages (PPO) each meet the
    row's ratio."""
    log_ratio = masked(inputs.policy - inputs.old, inputs.mask)
    log_sequence = row_means(log_ratio, inputs.mask, inputs.row_N, inputs.num_rows)[inputs.row_N]
    ratio = masked(log_sequence, inputs.mask).exp()
    return _clipped_surrogate(ratio, inputs, config.clip_low, config.clip_high, None)


def cispo_loss(inputs: LossInputs, config: CISPOLoss) -> LossTerms:
    """-sg(clip(ρ, 1 - clip_low, 1 + clip_high)) A log policy. MiniMax-M1, arXiv:2506.13585 eq. 4-5.

    Convention: clip_high is a distance from 1, so the cap is 1 + clip_high, as in the paper, verl and NeMo; TRL's
    epsilon_high is the cap itself. clip_low None: no lower bound. Every token keeps a gradient: its flags tell of a cut
    weight, whatever the sign of A."""
    ratio = masked(inputs.policy - inputs.old, inputs.mask).exp().detach()
    lowest = 0.0 if config.clip_low is None else 1 - config.clip_low
    highest = 1 + config.clip_high
    advantage = masked(inputs.advantage, inputs.mask)
    loss = -ratio.clamp(lowest, highest) * advantage * masked(inputs.policy, inputs.mask)
    return LossTerms(loss, ratio, ratio < lowest, ratio > highest)


def _clipped_surrogate(
    ratio: Tensor, inputs: LossInputs, clip_low: float, clip_high: float, dual_clip: float | None
) -> LossTerms:
    advantage = masked(inputs.advantage, inputs.mask)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantage, clipped * advantage)
    clipped_low = (ratio < 1 - clip_low) & (advantage < 0)
    clipped_high = (ratio > 1 + clip_high) & (advantage > 0)
    if dual_clip is not None:
        loss = torch.where(advantage < 0, torch.minimum(loss, -dual_clip * advantage), loss)
        clipped_high = clipped_high | ((ratio > dual_clip) & (advantage < 0))
    return LossTerms(loss, ratio, clipped_low, clipped_high)


LOSSES: dict[str, Callable[[LossInputs, Any], LossTerms]] = {
    "clip": clip_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
}
"""Adding a loss: one pure function here, one config class of the same kind in config_training.py."""


def clipped_value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """([N] loss, [N] bool clipped): max((V - R)², (clip(V, old ± clip) - R)²) / 2, as in OpenAI's PPO baselines.

    clip None: (V - R)² / 2. Clipped: the bound took effect, so that the token has no gradient."""
    plain = (values - returns).square() / 2
    if clip is None:
        return plain, torch.zeros_like(values, dtype=torch.bool)
    bounded = (torch.clamp(values, old - clip, old + clip) - returns).square() / 2
    return torch.maximum(plain, bounded), (bounded > plain).detach()
