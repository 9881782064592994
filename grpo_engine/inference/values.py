"""Values of completions by PPO's critic, at sampling time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_engine.model.memory_limit import TokenLimit, in_row_order, run_micro_batches
from grpo_engine.model.packing import collate
from grpo_engine.model.value import ValueModel
from grpo_engine.types import TrainRow


class CriticScorer:
    """Implements protocols.ValueScorer over the learner's own critic, so values are always the newest.

    Give it the learner's token limit: then its values are the very numbers that the critic's loss starts from."""

    def __init__(self, value: ValueModel, *, max_micro_batch_tokens: int, pad_token_id: int = 0) -> None:
        self._value = value
        self._limit = TokenLimit(max_micro_batch_tokens, value.device)
        self._pad_token_id = pad_token_id

    @torch.no_grad()
    def values(self, rows: Sequence[TrainRow]) -> list[list[float]]:
        """[T] for each row: the value before each completion token, in the order of `rows`.

        Halves its token limit when memory runs out. Raises OutOfMemory when a single row does not fit."""
        found: list[tuple[list[int], Tensor]] = []

        def work(indices: list[int], part: list[TrainRow]) -> None:
            batch = collate(part, device=self._value.device, packed=self._value.packed, pad_token_id=self._pad_token_id)
            found.append((indices, self._value.values(batch)))

        while not run_micro_batches(rows, self._limit, work, packed=self._value.packed):
            found.clear()
        return [values.tolist() for values in in_row_order(rows, found)]
