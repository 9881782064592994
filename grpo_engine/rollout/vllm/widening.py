"""Beside each sampled token: every token that truncation kept, and the probability they had before. Needs no vLLM.

Called inside vLLM's sampler (`extension`), read by `outputs`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_engine.rollout.vllm.outputs import MASS_OFFSET


def top_logprobs(logits_BV: Tensor, temperature_B: Tensor) -> Tensor:
    """Float32 [B]: log-probability of each row's likeliest token, untruncated, at the row's temperature (0 = 1)."""
    divisor_B1 = torch.where(temperature_B > 0, temperature_B, 1.0)[:, None].float()
    scaled_BV = logits_BV.float() / divisor_B1
    return scaled_BV.amax(-1) - scaled_BV.logsumexp(-1)


def widened(logprobs_BV: Tensor, full_top_B: Tensor, sampled_B: Tensor) -> tuple[Tensor, Tensor]:
    """Ids [B, W] int32 and values [B, W] float32, W = 2 + the most tokens kept in a row.

    `logprobs_BV` are truncated, minus infinity where a token was removed; `full_top_B` as `top_logprobs`. The likeliest
    token is always kept, so its two log-probabilities differ by the logarithm of the kept mass. Columns: the sampled
    token, the kept mass (under the id of a removed token), the kept tokens. Room that a row does not need repeats its
    sampled token, so that a reader may put a row into a dictionary.
    """
    sampled_B1 = sampled_B[:, None]
    own_B1 = logprobs_BV.gather(1, sampled_B1)
    num_kept_B = torch.isfinite(logprobs_BV).sum(-1)
    kept_BK, ids_BK = logprobs_BV.topk(max(1, int(num_kept_B.max())), dim=-1)
    lowest_B1, removed_B1 = logprobs_BV.min(dim=-1, keepdim=True)
    mass_B1 = MASS_OFFSET - (full_top_B[:, None] - kept_BK[:, :1])
    values_BW = torch.cat((own_B1, mass_B1, kept_BK), dim=1)
    ids_BW = torch.cat((sampled_B1, removed_B1, ids_BK), dim=1)
    unused_BW = torch.isneginf(values_BW)
    unused_BW[:, 1:2] = torch.isfinite(lowest_B1)  # nothing was removed
    values_BW = torch.where(unused_BW, own_B1, values_BW)
    return torch.where(unused_BW, sampled_B1, ids_BW).int(), values_BW
