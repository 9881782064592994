"""The frozen reference: log-probabilities that KL is measured against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from grpo_engine.model.logprobs import LogprobForward, collate, micro_batches
from grpo_engine.types import TrainRow


class ReferenceScorer:
    """Implements protocols.Scorer. Freezes `model`; give it a copy of its own, not the policy's module.

    Give it the learner's dtype and micro-batch size, so that KL at the first step is 0 and not rounding noise."""

    def __init__(
        self, model: PreTrainedModel, *, max_micro_batch_rows: int, pad_token_id: int, dtype: str = "float32"
    ) -> None:
        model.requires_grad_(False)
        self._forward = LogprobForward(model, dtype=dtype)
        self._max_micro_batch_rows = max_micro_batch_rows
        self._pad_token_id = pad_token_id

    @torch.no_grad()
    def score(self, rows: Sequence[TrainRow], temperature: float) -> list[list[float]]:
        """[T] nats for each row's completion tokens, full distribution at `temperature`, in the order of `rows`."""
        scores: list[list[float]] = [[] for _ in rows]
        for indices in micro_batches(rows, self._max_micro_batch_rows):
            batch = [replace(rows[index], kept_ids=None) for index in indices]
            tensors = collate(batch, pad_token_id=self._pad_token_id, device=self._forward.device)
            split = torch.split(self._forward(tensors, temperature).full, tensors.lengths)
            for index, values in zip(indices, split, strict=True):
                scores[index] = values.tolist()
        return scores
