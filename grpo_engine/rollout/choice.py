"""From logits and one uniform number a row to tokens and their log-probabilities.

A token is the inverse of the cumulative distribution, in token-id order, at the row's number. Large vocabularies are
searched in two steps, first the block of ids and then the id in it: sums of blocks are float32, everything cumulative
is float64. So a token's probability is exact but for float32 rounding, and one of probability 0 never comes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from grpo_engine.config import SamplingConfig
from grpo_engine.model.truncation import BLOCK_IDS, IMPOSSIBLE, by_blocks, cumulative, kept_mask
from grpo_engine.rollout.native.pick import pick


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
    scaled_BV, kept_BV = _scaled(logits_BV, sampling)
    picked = pick(scaled_BV, kept_BV, uniforms_B)
    if picked is not None:
        tokens_B, logprobs_B, full_logprobs_B, _ = picked
        return Choice(tokens_B, logprobs_B, full_logprobs_B, kept_BV)
    highest_B, likeliest_B = scaled_BV.max(dim=-1)
    weights_BV = (scaled_BV - highest_B[:, None]).exp_()
    full_sums = _block_sums(weights_BV)
    sampled_BV, sums = weights_BV, full_sums
    if kept_BV is not None:
        sampled_BV = weights_BV * kept_BV
        sums = _block_sums(sampled_BV)
    tokens_B = likeliest_B if uniforms_B is None else _search(sampled_BV, sums, uniforms_B)
    chosen_B = scaled_BV.gather(1, tokens_B[:, None])[:, 0] - highest_B
    logprobs_B, full_logprobs_B = (chosen_B - total[:, -1].log().float() for total in (sums, full_sums))
    return Choice(tokens_B, logprobs_B, full_logprobs_B, kept_BV)


def draw(logits_BV: Tensor, sampling: SamplingConfig, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens as `choose` samples them at a temperature above 0, and the float32 log-probabilities [B, V] of the
    distribution they were sampled from, minus infinity where truncation forbids."""
    scaled_BV, kept_BV = _scaled(logits_BV, sampling)
    picked = pick(scaled_BV, kept_BV, uniforms_B, with_all=True)
    if picked is not None:
        tokens_B, _, _, logprobs_BV = picked
        assert logprobs_BV is not None, "with_all asks for them"
        return tokens_B, logprobs_BV
    if kept_BV is not None:
        scaled_BV = torch.where(kept_BV, scaled_BV, IMPOSSIBLE)
    shifted_BV = scaled_BV - scaled_BV.amax(-1, keepdim=True)
    weights_BV = shifted_BV.exp()
    sums = _block_sums(weights_BV)
    return _search(weights_BV, sums, uniforms_B), shifted_BV - sums[:, -1:].log().float()


def _scaled(logits_BV: Tensor, sampling: SamplingConfig) -> tuple[Tensor, Tensor | None]:
    """float32 logits divided by a temperature above 0, and what truncation keeps of them; None without."""
    scaled_BV = logits_BV.float()
    if sampling.temperature not in (0, 1):
        scaled_BV = scaled_BV / sampling.temperature
    if not sampling.truncated:
        return scaled_BV, None
    return scaled_BV, kept_mask(scaled_BV, sampling.top_k, sampling.top_p, sampling.min_p)


def inverse_distribution(weights_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """First token id whose cumulative weight exceeds the number in [0, 1) times their sum; never one of weight 0."""
    return _search(weights_BV, _block_sums(weights_BV), uniforms_B)


def _block_sums(weights_BV: Tensor) -> Tensor:
    """[B, blocks] float64: weight up to and with each block; a small vocabulary is one block an id."""
    blocks, rest = by_blocks(weights_BV)
    if blocks is None:
        return cumulative(weights_BV.double())
    sums = blocks.sum(-1)
    if rest is not None:
        sums = torch.cat([sums, rest.sum(-1, keepdim=True)], dim=-1)
    return cumulative(sums.double())


def _search(weights_BV: Tensor, sums_BN: Tensor, uniforms_B: Tensor) -> Tensor:
    total_B = sums_BN[:, -1]
    target_B = _below(uniforms_B * total_B, total_B)
    block_B = _first_above(sums_BN, target_B)
    vocabulary = weights_BV.shape[1]
    if sums_BN.shape[1] == vocabulary:
        return block_B
    before_B = functional.pad(sums_BN, (1, 0)).gather(1, block_B[:, None])[:, 0]
    ids_BI = block_B[:, None] * BLOCK_IDS + torch.arange(BLOCK_IDS, device=weights_BV.device)
    inside_BI = weights_BV.gather(1, ids_BI.clamp(max=vocabulary - 1)).double() * (ids_BI < vocabulary)
    inside_BI = cumulative(inside_BI)
    # The block's float32 sum may exceed what its ids add up to.
    inside_B = _first_above(inside_BI, _below(target_B - before_B, inside_BI[:, -1]))
    return (block_B * BLOCK_IDS + inside_B).clamp(max=vocabulary - 1)  # a search for NaN ends behind the last id


def _below(target_B: Tensor, total_B: Tensor) -> Tensor:
    """Below the total even where rounding reached it, so that a search always ends at a possible token."""
    return torch.minimum(target_B, torch.nextafter(total_B, torch.zeros_like(total_B)))


def _first_above(cumulative_BN: Tensor, target_B: Tensor) -> Tensor:
    found_B = torch.searchsorted(cumulative_BN, target_B[:, None].contiguous(), right=True)[:, 0]
    return found_B.clamp(max=cumulative_BN.shape[1] - 1)
