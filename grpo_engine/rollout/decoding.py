"""The rows being decoded: prompts prefilled once, then one token a row and step."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_engine.rollout.kv_cache import RowsCache


class DecodingBatch:
    """B rows with their cache and the logits of their next token, `logits_BV`.

    Equal prompts are prefilled once and their cache rows repeated. Shorter prompts are padded on the left; padding is
    masked and takes no position.
    """

    def __init__(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_context_tokens: int) -> None:
        self._model: Any = model
        self._device = next(model.parameters()).device
        self._accepted = inspect.signature(model.forward).parameters
        self._last_position = max_context_tokens - 1
        self._cache = RowsCache()
        self._position_B: Tensor
        self._mask_BT: Tensor | None
        self.logits_BV: Tensor
        unique = {prompt: index for index, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        self._prefill(list(unique))
        if len(unique) < len(prompts):
            self.select_rows(torch.tensor([unique[tuple(prompt)] for prompt in prompts], device=self._device))

    def select_rows(self, rows: Tensor) -> None:
        """Go on with these rows only, in this order; a row may be named more than once."""
        self._cache.select_rows(rows)
        self.logits_BV = self.logits_BV[rows]
        self._position_B = self._position_B[rows]
        if self._mask_BT is not None:
            self._mask_BT = self._mask_BT[rows]

    def advance(self, tokens_B: Tensor) -> None:
        """Feed one token a row; afterwards `logits_BV` are those of the next one."""
        if self._mask_BT is not None:
            self._mask_BT = torch.nn.functional.pad(self._mask_BT, (0, 1), value=1)
        # A finished row that is still in the batch must not run past the model's positions.
        self._forward(tokens_B[:, None], self._position_B.clamp(max=self._last_position)[:, None])
        self._position_B = self._position_B + 1

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        lengths = [len(prompt) for prompt in prompts]
        width = max(lengths)
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=self._device)
        self._position_B = torch.tensor(lengths, device=self._device)
        padding_B1 = width - self._position_B[:, None]
        column_T = torch.arange(width, device=self._device)
        # Without padding no mask is passed: the model then takes its faster causal path.
        self._mask_BT = (column_T >= padding_B1).long() if min(lengths) < width else None
        self._forward(ids, (column_T - padding_B1).clamp(min=0))

    def _forward(self, ids_BT: Tensor, positions_BT: Tensor) -> None:
        optional = {"position_ids": positions_BT, "logits_to_keep": 1}
        output = self._model(
            input_ids=ids_BT,
            attention_mask=self._mask_BT,
            past_key_values=self._cache,
            use_cache=True,
            **{name: value for name, value in optional.items() if name in self._accepted},
        )
        self.logits_BV = output.logits[:, -1]
