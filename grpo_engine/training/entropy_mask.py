"""Which tokens the policy loss keeps: those of highest entropy ("Beyond the 80/20 rule", arXiv:2506.01939)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from grpo_engine.protocols import Communicator
from grpo_engine.types import TrainRow

ROUNDING = 1e-9
"""0.1 x 30 is a little more than 3 in floating point; it means 3."""


def keep_top_entropy(
    rows: Sequence[TrainRow], entropies: Sequence[Tensor], share: float, communicator: Communicator
) -> list[TrainRow]:
    """Rows whose `policy_mask` is True for the `share` of all ranks' trained tokens that has the highest entropy.

    `entropies`: [T] of each row, on the CPU. Collective: a rank without rows calls it too."""
    trained = [
        entropy if row.loss_mask is None else entropy[torch.tensor(row.loss_mask)]
        for row, entropy in zip(rows, entropies, strict=True)
    ]
    lowest = threshold(communicator.gather(torch.cat(trained) if trained else torch.zeros(0)), share)
    return [
        replace(row, policy_mask=(entropy >= lowest).tolist()) for row, entropy in zip(rows, entropies, strict=True)
    ]


def threshold(entropies: Sequence[Tensor], share: float) -> float:
    """The entropy of the last token that is kept when `share` of all tokens, rounded up, is kept.

    `entropies`: [n] of each rank's trained tokens. Tokens that equal the threshold are all kept. -inf without any."""
    every = torch.cat([entropy.double() for entropy in entropies])
    if every.numel() == 0:
        return -math.inf
    kept = max(1, math.ceil(share * every.numel() - ROUNDING))
    return float(every.kthvalue(every.numel() - kept + 1).values)
