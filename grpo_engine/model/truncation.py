"""Which tokens truncated sampling keeps.

The filters act one after another, in the order of Hugging Face transformers: (temperature,) top-k, top-p, min-p; each
looks at the distribution that the one before left, renormalised. The likeliest token is always kept. Equal logits
share their fate: all that tie with the last kept one are kept, so that the set never depends on the order of a sort
or on the batch (top-k may then keep more than k).
"""

from __future__ import annotations

import torch
from torch import Tensor

IMPOSSIBLE = float("-inf")


def kept_mask(logits_BV: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Bool [B, V], True = kept. `logits_BV` are float32 and already divided by the temperature.

    top_k 0, top_p 1 and min_p 0 switch the filters off.
    """
    kept_BV = torch.ones_like(logits_BV, dtype=torch.bool)
    if 0 < top_k < logits_BV.shape[-1]:
        kth_B1 = logits_BV.topk(top_k, dim=-1).values[:, -1:]
        kept_BV &= logits_BV >= kth_B1
    if top_p < 1:
        kept_BV &= _top_p(logits_BV.masked_fill(~kept_BV, IMPOSSIBLE), top_p)
    if min_p > 0:
        # Ratios of probabilities do not change by renormalising, so the raw logits decide.
        kept_BV &= logits_BV >= logits_BV.amax(-1, keepdim=True) + torch.tensor(min_p).log().item()
    return kept_BV


def cumulative(probabilities_BV: Tensor) -> Tensor:
    """Running sum over the last axis. On CUDA torch refuses its own in deterministic mode, so the CPU does it there."""
    if probabilities_BV.is_cuda and torch.are_deterministic_algorithms_enabled():
        return probabilities_BV.cpu().cumsum(-1).to(probabilities_BV.device)
    return probabilities_BV.cumsum(-1)


def _top_p(logits_BV: Tensor, top_p: float) -> Tensor:
    """The smallest set of likeliest tokens whose mass reaches top_p, with all ties of its last member."""
    sorted_BV, _ = logits_BV.sort(dim=-1, descending=True)
    mass_BV = cumulative(torch.softmax(sorted_BV.double(), dim=-1))
    # A token is needed as long as the tokens before it have not reached top_p; the first one always is.
    num_needed_B1 = (mass_BV[:, :-1] < top_p).sum(-1, keepdim=True)
    last_B1 = sorted_BV.gather(-1, num_needed_B1)
    return logits_BV >= last_B1
