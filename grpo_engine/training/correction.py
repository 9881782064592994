"""Importance weights from the sampler's distribution to the trainer's own: truncated importance sampling
(fengyao.notion.site/off-policy-rl) and its masking variants. All tensors [N].

Sampler and trainer compute the same policy with other kernels, precision or, later, older weights. With
gap = old - sampled log-probabilities (old: the trainer's, before the batch's first update):

    token      w_t = exp(gap_t)
    sequence   w   = exp(sum of the row's gaps): the exact ratio of the sequence. Its spread grows with length: a mean
               gap of 0.001 nat over 1,000 tokens is a factor 2.7, so bounds on it drop long completions first
    geometric  w   = exp(mean of the row's gaps): judges a row without that bias

    truncate   weight = min(max(w, min_weight), max_weight)
    mask       weight = w inside [min_weight, max_weight], 0 outside; at level geometric 1 inside

The weights multiply the policy term alone, never KL, entropy or auxiliary terms, and never change a denominator:
dropping tokens from it would raise the weight of the rest. They carry no gradient and stay the same over the updates of
a batch: `old` is frozen while a batch has several, and with one it is the present forward's own detached value.

A NaN gap stays NaN, so that the non-finite guard sees a broken sampler instead of a silently dropped row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_engine.config_training import CorrectionConfig
from grpo_engine.training.losses import masked, row_means, row_sums


class Correction(NamedTuple):
    weight: Tensor
    """[N] float64, detached."""
    dropped: Tensor
    """[N] bool: weight 0 because it was out of bounds."""


@torch.no_grad()
def correction_weights(gap: Tensor, mask: Tensor, row_N: Tensor, num_rows: int, config: CorrectionConfig) -> Correction:
    """Weight of each token; `mask` [N] True = trained token, the others count in no sum. kind none gives ones."""
    gap = masked(gap.detach().double(), mask)
    ones, never = torch.ones_like(gap), torch.zeros_like(mask)
    if config.kind == "none":
        return Correction(ones, never)
    weight = _log_weight(gap, mask, row_N, num_rows, config.level).exp()
    if config.kind == "truncate":
        return Correction(weight.clamp(config.min_weight, config.max_weight), never)
    outside = (weight < config.min_weight) | (weight > config.max_weight)
    kept = torch.where(weight.isnan(), weight, ones) if config.level == "geometric" else weight
    return Correction(torch.where(outside, torch.zeros_like(weight), kept), outside & mask)


def _log_weight(gap: Tensor, mask: Tensor, row_N: Tensor, num_rows: int, level: str) -> Tensor:
    if level == "token":
        return gap
    per_row = row_sums(gap, row_N, num_rows) if level == "sequence" else row_means(gap, mask, row_N, num_rows)
    return per_row[row_N]
