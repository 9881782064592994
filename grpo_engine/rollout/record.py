"""What decoding wrote down, by request, while rows leave the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_engine.errors import NonFinite
from grpo_engine.rollout.choice import Choice

KeptIds = list[list[list[int]]]


class Record:
    """Tokens and log-probabilities of N requests, up to T steps; nothing beyond a row's length counts."""

    def __init__(self, num_requests: int, num_steps: int, device: torch.device, *, truncated: bool) -> None:
        shape = (num_requests, num_steps)
        self.tokens_NT = torch.zeros(shape, dtype=torch.long, device=device)
        self.logprobs_NT = torch.zeros(shape, device=device)
        self.full_logprobs_NT = torch.zeros(shape, device=device)
        self.lengths_N = torch.zeros(num_requests, dtype=torch.long, device=device)
        self._kept: KeptIds | None = [[] for _ in range(num_requests)] if truncated else None

    def write(self, step: int, rows_B: Tensor, choice: Choice) -> None:
        """Note one step's choice; `rows_B` names the request of each row of the batch."""
        self.tokens_NT[rows_B, step] = choice.tokens_B
        self.logprobs_NT[rows_B, step] = choice.logprobs_B
        self.full_logprobs_NT[rows_B, step] = choice.full_logprobs_B
        if self._kept is not None and choice.kept_BV is not None:
            self._write_kept(self._kept, rows_B, choice.kept_BV)

    def close(self, step: int, rows_B: Tensor, ended_B: Tensor) -> Tensor:
        """Set the length of rows that ended now for the first time; bool [B], True = goes on."""
        open_B = self.lengths_N[rows_B] == 0
        self.lengths_N[rows_B[open_B & ended_B]] = step + 1
        return open_B & ~ended_B

    def kept_ids(self) -> KeptIds | None:
        """[N][T][kept], None without truncation."""
        if self._kept is None:
            return None
        return [steps[:length] for steps, length in zip(self._kept, self.lengths_N.tolist(), strict=True)]

    def check_finite(self) -> None:
        """NonFinite when a token that counts has a log-probability that is not a number."""
        counts_NT = torch.arange(self.tokens_NT.shape[1], device=self.lengths_N.device) < self.lengths_N[:, None]
        if not bool(torch.isfinite(self.logprobs_NT[counts_NT]).all()):
            raise NonFinite(
                "the model's logits are not finite while sampling; lower the learning rate or check the model"
            )

    @staticmethod
    def _write_kept(kept: KeptIds, rows_B: Tensor, kept_BV: Tensor) -> None:
        ids = kept_BV.nonzero()[:, 1].tolist()
        start = 0
        for row, count in zip(rows_B.tolist(), kept_BV.sum(-1).tolist(), strict=True):
            kept[row].append(ids[start : start + count])
            start += count
