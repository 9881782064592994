"""A key-value cache whose rows can be multiplied and dropped, for Hugging Face models.

Transformers' DynamicCache copies everything at every token (torch.cat). Here a layer owns room for more tokens than it
holds and writes in place. Sliding-window layers keep all tokens too; the model's own mask limits what they see.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

ROOM_TOKENS = 64
"""Tokens by which the buffers grow, at least."""


class RowsLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values [rows, heads, capacity, head dim]; the first `length` tokens are filled."""

    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take dtype, device and shapes from the first tokens; keys and values may differ in width."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states[:, :, :0]
        self.values = value_states[:, :, :0]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append tokens; returns all keys and values so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        if end > self.keys.shape[-2]:
            room = 0 if self.length == 0 else max(ROOM_TOKENS, end // 4)
            self.keys = self._with_room(self.keys, end + room)
            self.values = self._with_room(self.values, end + room)
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys seen by the next `query_length` tokens, offset)."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self.length

    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or drop rows; `rows` are indices into the present ones."""
        self.keys = self.keys[:, :, : self.length].index_select(0, rows)
        self.values = self.values[:, :, : self.length].index_select(0, rows)

    def _with_room(self, old: Tensor, capacity: int) -> Tensor:
        rows, heads, _, width = old.shape
        new = old.new_empty(rows, heads, capacity, width)
        new[:, :, : self.length] = old[:, :, : self.length]
        return new


class RowsCache(Cache):
    """One RowsLayer for each layer of the model."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=RowsLayer)

    def select_rows(self, rows: Tensor) -> None:
        """Rows of the batch to go on with, in this order."""
        for layer in self.layers:
            assert isinstance(layer, RowsLayer)
            layer.select_rows(rows)
