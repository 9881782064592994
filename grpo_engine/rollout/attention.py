"""Attention of rows that continue shared prompts.

The completions of a group attend to the same prompt: its keys and values exist once, and all rows of the group meet
them together. Each row's own tokens are kept beside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from grpo_engine.model.attention import compute_dtype
from grpo_engine.rollout.arrangement import Arrangement, Integers
from grpo_engine.rollout.native.attend import is_compiled
from grpo_engine.rollout.product_cache import ProductCache
from grpo_engine.rollout.tile_cache import TileCache


class LayerCache(Protocol):
    """Keys and values of one layer."""

    def make_room(self, rows: Arrangement) -> None:
        """For the new tokens of the step that has begun."""
        ...

    def attend(
        self, rows: Arrangement, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Take in keys and values [B, heads, Q, width]; queries of the same form to attention [B, Q, heads, width]."""
        ...

    def selected(self, old: Arrangement, new: Arrangement, slots: Tensor, row_index: Tensor) -> Self:
        """Of some slots and rows."""
        ...


class Block:
    """B rows that were admitted together."""

    def __init__(self, rows: Arrangement, layers: Mapping[int, LayerCache]) -> None:
        self.rows, self.layers = rows, dict(layers)

    def begin(self, num_tokens: int) -> None:
        """Q tokens a row come next."""
        self.rows.begin(num_tokens)
        for layer in self.layers.values():
            layer.make_room(self.rows)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor:
        """Take in keys and values [B, heads, Q, width]; queries of the same form to attention [B, Q, heads, width]."""
        dtype, scale = compute_dtype(query), query.shape[-1] ** -0.5 if scaling is None else scaling
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        with torch.autocast(query.device.type, enabled=False):
            return self.layers[layer].attend(self.rows, query, key, value, scale, window)

    def select(self, rows: Integers) -> Block:
        """A block of these rows alone, ascending, at least one. Prompts that no row continues are forgotten."""
        new, slots, row_index = self.rows.select(rows)
        return Block(new, {n: layer.selected(self.rows, new, slots, row_index) for n, layer in self.layers.items()})


# ---------------------------------------------------------------- new blocks
def block_of_prompts(
    states: Mapping[int, tuple[Tensor, Tensor]], starts_S: Integers, lengths_S: Integers, counts_S: Sequence[int],
    room: int,
) -> Block:  # fmt: skip
    """Rows that begin: `counts_S` of each prompt.

    `states`: keys and values of each layer, [heads, tokens, width]; `starts_S` and `lengths_S`: where the prompts are
    among the tokens; `room`: own tokens that products reserve at first."""
    device = next(iter(states.values()))[0].device
    row_slot = np.repeat(np.arange(len(lengths_S)), counts_S)
    rows = Arrangement(lengths_S, row_slot, np.zeros(len(row_slot), dtype=np.int64), device)
    column_P = np.arange(rows.prompt_width)
    index = np.where(column_P < lengths_S[:, None], starts_S[:, None] + column_P, 0)
    index_SP = torch.from_numpy(index).to(device)
    layers: dict[int, LayerCache] = {}
    for number, each in states.items():
        keys, values = (states_HTD[:, index_SP].to(compute_dtype(states_HTD)) for states_HTD in each)
        layers[number] = (
            TileCache.of_prompts(rows, keys, values)
            if keys.shape == values.shape and is_compiled(keys.dtype, device)
            else ProductCache.of_prompts(rows, keys, values, room)
        )
    return Block(rows, layers)


def joined_blocks(first: Block, second: Block) -> Block:
    """One block of the rows of both."""
    rows, layers = first.rows.joined(second.rows), dict[int, LayerCache]()
    for number, layer in first.layers.items():
        kind: Any = type(layer)  # both were made on one machine for one model
        layers[number] = kind.joined([(layer, first.rows), (second.layers[number], second.rows)], rows)
    return Block(rows, layers)
