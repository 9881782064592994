"""Which tokens truncated sampling keeps.

The filters act one after another, in the order of Hugging Face transformers: (temperature,) top-k, top-p, min-p; each
looks at the distribution that the one before left, renormalised. The likeliest token is always kept. Equal logits
share their fate: all that tie with the last kept one are kept, so that the set never depends on the order of a sort
or on the batch (top-k may then keep more than k).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

IMPOSSIBLE = float("-inf")
BLOCK_IDS = 128
"""Token ids that are looked at together in a large vocabulary."""
LARGE_VOCABULARY = 4096
"""From here on blocks are worth it."""
NUCLEUS_IDS = 512
"""As many of the likeliest ids nearly always hold a nucleus, so that only they are sorted."""


def kept_mask(logits_BV: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Bool [B, V], True = kept. `logits_BV` are float32 and already divided by the temperature.

    top_k 0, top_p 1 and min_p 0 switch the filters off.
    """
    kept_BV: Tensor | None = None
    if 0 < top_k < logits_BV.shape[-1]:
        kept_BV = logits_BV >= _kth_largest(logits_BV, top_k)
    if top_p < 1:
        left_BV = logits_BV if kept_BV is None else logits_BV.masked_fill(~kept_BV, IMPOSSIBLE)
        kept_BV = _both(kept_BV, _top_p(left_BV, top_p))
    if min_p > 0:
        # Ratios of probabilities do not change by renormalising, so the raw logits decide.
        kept_BV = _both(kept_BV, logits_BV >= logits_BV.amax(-1, keepdim=True) + _log(min_p))
    return torch.ones_like(logits_BV, dtype=torch.bool) if kept_BV is None else kept_BV


def _both(kept_BV: Tensor | None, more_BV: Tensor) -> Tensor:
    return more_BV if kept_BV is None else kept_BV & more_BV


@cache
def _log(min_p: float) -> float:
    """In float32."""
    return torch.tensor(min_p).log().item()


def cumulative(probabilities_BV: Tensor) -> Tensor:
    """Running sum over the last axis. On CUDA torch refuses its own in deterministic mode, so the CPU does it there."""
    if probabilities_BV.is_cuda and torch.are_deterministic_algorithms_enabled():
        return probabilities_BV.cpu().cumsum(-1).to(probabilities_BV.device)
    return probabilities_BV.cumsum(-1)


def by_blocks(values_BV: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Views [B, N, BLOCK_IDS] of whole blocks and [B, rest] of the ids behind them (None where there are none); both
    None for a small vocabulary."""
    vocabulary = values_BV.shape[-1]
    if vocabulary < LARGE_VOCABULARY:
        return None, None
    whole = vocabulary - vocabulary % BLOCK_IDS
    rest = values_BV[:, whole:] if whole < vocabulary else None
    return torch.unflatten(values_BV[:, :whole], 1, (-1, BLOCK_IDS)), rest


def _kth_largest(logits_BV: Tensor, k: int) -> Tensor:
    """[B, 1]. The k blocks with the largest maxima hold the k largest values: each has one at least as large as any
    value elsewhere."""
    blocks, rest = by_blocks(logits_BV)
    candidates = logits_BV
    if blocks is not None and k * BLOCK_IDS <= logits_BV.shape[-1] // 4:
        best_BK = blocks.amax(-1).topk(k, dim=-1).indices
        candidates = blocks.gather(1, best_BK[..., None].expand(-1, -1, BLOCK_IDS)).flatten(1)
        if rest is not None:
            candidates = torch.cat([candidates, rest], dim=-1)
    return candidates.topk(k, dim=-1).values[:, -1:]


def _top_p(logits_BV: Tensor, top_p: float) -> Tensor:
    """The smallest set of likeliest tokens whose mass reaches top_p, with all ties of its last member."""
    total_B1 = logits_BV.double().logsumexp(-1, keepdim=True)
    sorted_BV = _likeliest(logits_BV, NUCLEUS_IDS)
    mass_BV = cumulative((sorted_BV.double() - total_B1).exp())
    if sorted_BV.shape[-1] < logits_BV.shape[-1] and bool((mass_BV[:, -1] < top_p).any()):
        sorted_BV = _likeliest(logits_BV, logits_BV.shape[-1])
        mass_BV = cumulative((sorted_BV.double() - total_B1).exp())
    # A token is needed as long as the tokens before it have not reached top_p; the first one always is.
    num_needed_B1 = (mass_BV[:, :-1] < top_p).sum(-1, keepdim=True)
    last_B1 = sorted_BV.gather(-1, num_needed_B1)
    return logits_BV >= last_B1


def _likeliest(logits_BV: Tensor, count: int) -> Tensor:
    """The `count` largest logits, falling. On accelerators all of them: sorting is cheap, asking for more is not."""
    if logits_BV.device.type != "cpu" or count >= logits_BV.shape[-1] or logits_BV.shape[-1] < LARGE_VOCABULARY:
        return logits_BV.sort(dim=-1, descending=True).values
    return logits_BV.topk(count, dim=-1).values
