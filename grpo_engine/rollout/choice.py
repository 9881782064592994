"""From logits and one uniform number a row to tokens and their log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_engine.config import SamplingConfig
from grpo_engine.model.truncation import IMPOSSIBLE, cumulative, kept_mask


@dataclass(frozen=True, slots=True)
class Choice:
    """One token a row."""

    tokens_B: Tensor
    logprobs_B: Tensor
    """float32, under the distribution sampled from."""
    full_logprobs_B: Tensor
    """float32, under the untruncated distribution at the same temperature."""
    kept_BV: Tensor | None
    """Bool, True = kept by truncation; None without."""


def choose(logits_BV: Tensor, sampling: SamplingConfig, uniforms_B: Tensor | None) -> Choice:
    """Sample by inverse distribution at `uniforms_B` (float64), or take the likeliest token when it is None.

    At temperature 0 the log-probabilities are those at temperature 1.
    """
    scaled_BV = logits_BV.float() / (sampling.temperature or 1.0)
    full_BV = torch.log_softmax(scaled_BV, dim=-1)
    kept_BV = None
    sampled_BV = full_BV
    if sampling.truncated:
        kept_BV = kept_mask(scaled_BV, sampling.top_k, sampling.top_p, sampling.min_p)
        sampled_BV = torch.log_softmax(scaled_BV.masked_fill(~kept_BV, IMPOSSIBLE), dim=-1)
    tokens_B = scaled_BV.argmax(-1) if uniforms_B is None else inverse_distribution(sampled_BV, uniforms_B)
    index_B1 = tokens_B[:, None]
    return Choice(tokens_B, sampled_BV.gather(1, index_B1)[:, 0], full_BV.gather(1, index_B1)[:, 0], kept_BV)


def inverse_distribution(logprobs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """First token id whose cumulative probability exceeds the number in [0, 1); never one of probability 0."""
    cumulative_BV = cumulative(logprobs_BV.double().exp())
    total_B = cumulative_BV[:, -1]
    # Below the total even when the product rounds up to it, so that the search always ends at a possible token.
    target_B = torch.minimum(uniforms_B * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    found_B = torch.searchsorted(cumulative_BV, target_B[:, None], right=True)[:, 0]
    return found_B.clamp(max=logprobs_BV.shape[-1] - 1)
