"""A key-value cache whose rows can be multiplied and dropped, for Hugging Face models.

Transformers' DynamicCache copies everything at every token (torch.cat). Here a layer owns room for more tokens than it
holds and writes in place. Sliding-window layers keep all tokens too; the model's own mask limits what they see.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
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

    def move_right(self, shift_B: Tensor) -> None:
        """Move each row's tokens by so many columns; what comes in from the left means nothing."""
        column_BT = (torch.arange(self.length, device=self.keys.device) - shift_B[:, None]).clamp(min=0)
        index = column_BT[:, None, :, None]
        self.keys, self.values = (
            held[:, :, : self.length].gather(2, index.expand(-1, held.shape[1], -1, held.shape[3]))
            for held in (self.keys, self.values)
        )

    def drop_left(self, num_tokens: int) -> None:
        """Forget the first columns."""
        self.keys, self.values = self.keys[:, :, num_tokens:], self.values[:, :, num_tokens:]
        self.length -= num_tokens

    def joined(self, other: RowsLayer) -> RowsLayer:
        """The rows of both; the shorter is padded on the left."""
        new, length = RowsLayer(), max(self.length, other.length)
        new.lazy_initialization(self.keys, self.values)
        new.keys, new.values = (
            torch.cat([_padded(mine[:, :, : self.length], length), _padded(theirs[:, :, : other.length], length)])
            for mine, theirs in ((self.keys, other.keys), (self.values, other.values))
        )
        new.length = length
        return new

    def _with_room(self, old: Tensor, capacity: int) -> Tensor:
        rows, heads, _, width = old.shape
        new = old.new_empty(rows, heads, capacity, width)
        new[:, :, : self.length] = old[:, :, : self.length]
        return new


def _padded(held: Tensor, length: int) -> Tensor:
    return functional.pad(held, (0, 0, length - held.shape[2], 0))


class RowsCache(Cache):
    """One RowsLayer for each layer of the model."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=RowsLayer)

    @property
    def rows_layers(self) -> list[RowsLayer]:
        return cast("list[RowsLayer]", self.layers)

    def select_rows(self, rows: Tensor) -> None:
        """Rows of the batch to go on with, in this order; a row may be named more than once."""
        for layer in self.rows_layers:
            layer.select_rows(rows)

    def crop_to(self, length: int) -> None:
        """Keep the first columns."""
        for layer in self.rows_layers:
            layer.length = length

    def move_right(self, shift_B: Tensor) -> None:
        """As RowsLayer.move_right."""
        for layer in self.rows_layers:
            layer.move_right(shift_B)

    def drop_left(self, num_tokens: int) -> None:
        """As RowsLayer.drop_left."""
        for layer in self.rows_layers:
            layer.drop_left(num_tokens)

    def joined(self, other: RowsCache) -> RowsCache:
        """The rows of both, the shorter padded on the left."""
        new = RowsCache()
        new.layers = [mine.joined(theirs) for mine, theirs in zip(self.rows_layers, other.rows_layers, strict=True)]
        return new
