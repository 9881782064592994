"""The frozen reference: log-probabilities that KL is measured against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_engine.model.logprobs import LogprobForward
from grpo_engine.model.memory_limit import TokenLimit, in_row_order, run_micro_batches
from grpo_engine.model.packing import collate
from grpo_engine.types import TrainRow


class ReferenceScorer:
    """Implements protocols.Scorer over a model that nobody trains, or over the policy's own module within `around`.

    `around` is entered around every scoring and turns the module into the reference: with an adapter, it is the policy
    with its adapter off. Without it `model` is frozen here; give it a copy of its own.

    Give it the learner's dtype and token limit, so that KL at the first step is 0 and not rounding noise."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_micro_batch_tokens: int,
        pad_token_id: int = 0,
        dtype: str = "float32",
        around: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> None:
        if around is None:
            model.requires_grad_(False)
        self._forward = LogprobForward(model, dtype=dtype)
        self._limit = TokenLimit(max_micro_batch_tokens, self._forward.device)
        self._pad_token_id = pad_token_id
        self._around = around or nullcontext

    @torch.no_grad()
    def score(self, rows: Sequence[TrainRow], temperature: float) -> list[list[float]]:
        """[T] nats for each row's completion tokens, full distribution at `temperature`, in the order of `rows`.

        Halves its token limit when memory runs out. Raises OutOfMemory when a single row does not fit."""
        found: list[tuple[list[int], Tensor]] = []
        forward = self._forward

        def work(indices: list[int], part: list[TrainRow]) -> None:
            untruncated = [replace(row, kept_ids=None) for row in part]
            batch = collate(untruncated, device=forward.device, packed=forward.packed, pad_token_id=self._pad_token_id)
            found.append((indices, forward(batch, temperature).full))

        with self._around():
            while not run_micro_batches(rows, self._limit, work, packed=forward.packed):
                found.clear()
        return [values.tolist() for values in in_row_order(rows, found)]
