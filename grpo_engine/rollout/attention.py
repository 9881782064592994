"""Attention of rows that continue shared prompts.

The completions of a group attend to the same prompt: its keys and values exist once, and the scores of all rows of the
group are one matrix product. Each row's own tokens are kept beside. The scores over both meet in one softmax, in
float32, so that the result is ordinary attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from grpo_engine.model.attention import compute_dtype
from grpo_engine.rollout.head_store import HeadStore, joined, merged_heads, mixed, scores
from grpo_engine.rollout.native.attend import MOST_QUERIES, attend, is_compiled

ROOM_TOKENS = 64
"""Tokens a row by which caches grow, at least."""

Integers = npt.NDArray[np.int64]


@dataclass(slots=True)
class LayerCache:
    """Keys and values of one layer."""

    prompt_keys: HeadStore
    prompt_values: HeadStore
    own_keys: HeadStore
    own_values: HeadStore


@dataclass(slots=True)
class _Step:
    """What all layers share while Q tokens are fed."""

    num_tokens: int
    native: dict[int | None, bool] = field(default_factory=dict)
    """By sliding window: nothing lies outside, so that attention can be computed in C."""
    indices: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """By (parts, capacity) of a store: places of the new tokens."""
    sizes: tuple[Tensor, Tensor, Tensor] | None = None
    """`Block._sizes`"""
    biases: dict[int | None, Tensor | None] = field(default_factory=dict)
    """By sliding window: [B, 1, 1, Q, P + T], 0 or minus infinity; None where everything is seen."""


class Block:
    """B rows that were admitted together.

    The prompts of S slots are padded on the right to P tokens; a row's own tokens start at 0. Rows of a slot are
    neighbours. Lengths live on the host."""

    def __init__(
        self, layers: Mapping[int, LayerCache], prompt_lengths_S: Integers, row_slot_B: Integers, lengths_B: Integers,
        device: torch.device,
    ) -> None:  # fmt: skip
        """`row_slot_B`, ascending: the prompt that each row continues; `lengths_B`: own tokens that it holds."""
        self.layers = dict(layers)
        self.lengths_B = lengths_B
        self.prompt_lengths_S = prompt_lengths_S
        self.prompt_width = int(prompt_lengths_S.max())
        """P."""
        self.row_slot_B = row_slot_B
        self.device = device
        self._step = _Step(0)
        self._arrange()

    # ---------------------------------------------------------------- sizes
    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.lengths_B)

    @property
    def held(self) -> int:
        """Own tokens of the longest row."""
        return int(self.lengths_B.max())

    @property
    def prompt_lengths_B(self) -> Integers:
        """Tokens of each row's prompt."""
        return self.prompt_lengths_S[self.row_slot_B]

    # ---------------------------------------------------------------- steps
    def begin(self, num_tokens: int) -> None:
        """Q tokens a row come next."""
        self._step = _Step(num_tokens)
        needed = self.held + num_tokens
        room = needed + max(ROOM_TOKENS, needed // 4)
        for layer in self.layers.values():
            if layer.own_keys.capacity < needed:
                layer.own_keys = joined([(layer.own_keys, self.held)], room, layer.own_keys.merge)
                layer.own_values = joined([(layer.own_values, self.held)], room, layer.own_values.merge)

    def keep(self, counts_B: Integers) -> None:
        """Of the tokens fed last, hold so many of each row."""
        self.lengths_B = self.lengths_B + counts_B

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor:
        """Take in keys and values [B, heads, Q, width]; queries of the same form to attention [B, Q, heads, width]."""
        cache, dtype = self.layers[layer], compute_dtype(query)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        key, value, num_tokens, heads = key.to(dtype), value.to(dtype), query.shape[2], key.shape[1]
        # The queries that meet one key-value head are neighbours: [B, heads, N, width].
        queries = torch.unflatten(query.to(dtype), 1, (heads, -1)).flatten(2, 3)
        with torch.autocast(query.device.type, enabled=False):
            if self._is_native(cache, queries.shape[2], window):
                output = self._native(cache, queries, key, value, scale)
            else:
                cache.own_keys.write(key, self._index(cache.own_keys))
                cache.own_values.write(value, self._index(cache.own_values))
                output = self._by_products(cache, queries, scale, window)
        return torch.unflatten(output, 2, (-1, num_tokens)).permute(0, 3, 1, 2, 4).flatten(2, 3)

    # ---------------------------------------------------------------- in C
    def _is_native(self, cache: LayerCache, num_queries: int, window: int | None) -> bool:
        if window not in self._step.native:
            longest = self.prompt_width + self.held + self._step.num_tokens
            self._step.native[window] = window is None or longest <= window
        keys = cache.own_keys
        fits = num_queries <= MOST_QUERIES and keys.merge == 1 and self._step.native[window]
        return fits and is_compiled(keys.width, keys.data.dtype, self.device)

    def _native(self, cache: LayerCache, queries: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """[B, heads, N, width]; takes in keys and values, too."""
        held, prompts, places = self._sizes()
        weights = scores(self._by_slot(queries), cache.prompt_keys, self.prompt_width, scale)
        stores = (cache.own_keys.data, cache.own_values.data)
        output = attend(queries.contiguous(), key, value, *stores, held, prompts, places, weights, scale)
        output += mixed(weights, cache.prompt_values)
        return self._by_row(output.transpose(1, 2))

    def _sizes(self) -> tuple[Tensor, Tensor, Tensor]:
        """int64 [B]: own tokens held, tokens of the prompt, place in [S x R]."""
        if self._step.sizes is None:
            places = torch.arange(self.num_rows) if self._even else self._place_of_row
            self._step.sizes = (self._tensor(self.lengths_B), self._tensor(self.prompt_lengths_B), places)
        return self._step.sizes

    # ---------------------------------------------------------------- by matrix products
    def _by_products(self, cache: LayerCache, queries: Tensor, scale: float, window: int | None) -> Tensor:
        """[B, heads, N, width]"""
        weights = self._weights(cache, queries, scale, window)
        width = self.prompt_width
        own = mixed(weights[:, :, None, :, width:], cache.own_values)[:, :, 0]
        shared = self._by_slot(weights[..., :width]).transpose(1, 2)
        return own + self._by_row(mixed(shared, cache.prompt_values).transpose(1, 2))

    def _weights(self, cache: LayerCache, queries: Tensor, scale: float, window: int | None) -> Tensor:
        """[B, heads, N, P + T]: attention to the row's prompt and its own tokens."""
        num_tokens = self._step.num_tokens
        shared = scores(self._by_slot(queries), cache.prompt_keys, self.prompt_width, scale)
        own = scores(queries[:, None], cache.own_keys, self.held + num_tokens, scale)[:, :, 0]
        joint = torch.cat([self._by_row(shared.transpose(1, 2)), own], -1)
        bias = self._bias(window)
        if bias is not None:
            torch.unflatten(joint, 2, (-1, num_tokens)).add_(bias)
        return torch.softmax(joint, -1, dtype=torch.float32).to(queries.dtype)

    # ---------------------------------------------------------------- what layers share in a step
    def _index(self, store: HeadStore) -> Tensor:
        parts, capacity = store.data.shape[1], store.capacity
        if (parts, capacity) not in self._step.indices:
            column_BQ = self.lengths_B[:, None] + np.arange(self._step.num_tokens)
            part_BP = np.arange(self.num_rows * parts).reshape(-1, parts)
            index_BPQ = part_BP[:, :, None] * capacity + column_BQ[:, None]
            self._step.indices[parts, capacity] = self._tensor(index_BPQ.ravel())
        return self._step.indices[parts, capacity]

    def _bias(self, window: int | None) -> Tensor | None:
        if window not in self._step.biases:
            prompts, num_keys = self.prompt_lengths_B, self.prompt_width + self.held + self._step.num_tokens
            # A single query sees all keys when nothing is padded.
            full = self._step.num_tokens == 1 and int((prompts + self.lengths_B).min()) + 1 == num_keys
            within = window is None or num_keys <= window
            self._step.biases[window] = None if full and within else self._make_bias(window)
        return self._step.biases[window]

    def _make_bias(self, window: int | None) -> Tensor:
        num_tokens = self._step.num_tokens
        prompt_B11 = self._tensor(self.prompt_lengths_B)[:, None, None]
        own_B11 = self._tensor(self.lengths_B)[:, None, None]
        column_P = torch.arange(self.prompt_width, device=self.device)
        column_T = torch.arange(self.held + num_tokens, device=self.device)
        query_BQ1 = prompt_B11 + own_B11 + torch.arange(num_tokens, device=self.device)[:, None]
        # Positions of the keys; padding lies in the far future, which no query sees.
        key_B1L = torch.cat([torch.where(column_P < prompt_B11, column_P, 2**62), prompt_B11 + column_T], -1)
        seen_BQL = key_B1L <= query_BQ1
        if window is not None:
            seen_BQL &= query_BQ1 - key_B1L < window
        bias = torch.zeros(seen_BQL.shape, device=self.device).masked_fill_(~seen_BQL, float("-inf"))
        return bias[:, None, None]

    # ---------------------------------------------------------------- rows and slots
    def _arrange(self) -> None:
        """Where rows sit in [S, R], R the rows of the fullest slot."""
        counts_S = np.bincount(self.row_slot_B, minlength=len(self.prompt_lengths_S))
        self.repeats = int(counts_S.max())
        self._even = bool((counts_S == self.repeats).all())
        if self._even:
            return
        rank_B = np.arange(self.num_rows) - np.repeat(counts_S.cumsum() - counts_S, counts_S)
        places_B = self.row_slot_B * self.repeats + rank_B
        rows = np.zeros(len(counts_S) * self.repeats, dtype=np.int64)
        rows[places_B] = np.arange(self.num_rows)
        self._row_of_place, self._place_of_row = self._tensor(rows), self._tensor(places_B)

    def _by_slot(self, tensor_B: Tensor) -> Tensor:
        """[B, …] to [S, R, …]; row 0 stands in where a slot has fewer rows."""
        tensor = tensor_B if self._even else tensor_B.index_select(0, self._row_of_place)
        return torch.unflatten(tensor, 0, (-1, self.repeats))

    def _by_row(self, tensor_SR: Tensor) -> Tensor:
        """[S, R, …] to [B, …]."""
        flat = tensor_SR.flatten(0, 1)
        return flat if self._even else flat.index_select(0, self._place_of_row)

    def select(self, rows: Integers) -> Block:
        """A block of these rows alone, ascending, at least one. Prompts that no row continues are forgotten."""
        slots, row_slot = np.unique(self.row_slot_B[rows], return_inverse=True)
        layers: dict[int, LayerCache] = {}
        new = Block(layers, self.prompt_lengths_S[slots], row_slot.astype(np.int64), self.lengths_B[rows], self.device)
        slot_index, row_index = self._tensor(slots.astype(np.int64)), self._tensor(rows)
        for number, layer in self.layers.items():
            keys, values = layer.prompt_keys, layer.prompt_values
            if len(slots) < len(self.prompt_lengths_S):
                width = new.prompt_width
                keys = keys.selected(slot_index, width, width, new.prompt_merge(keys.heads, keys.width))
                values = values.selected(slot_index, width, width, 1)
            held, room = new.held, min(layer.own_keys.capacity, new.held + ROOM_TOKENS)
            merge = new.own_merge(keys.heads, keys.width, keys.data.dtype)
            own_keys = layer.own_keys.selected(row_index, held, room, merge)
            new.layers[number] = LayerCache(keys, values, own_keys, layer.own_values.selected(row_index, held, room, 1))
        return new

    def prompt_merge(self, heads: int, width: int) -> int:
        """How many heads' keys of the prompts lie side by side."""
        return merged_heads(len(self.prompt_lengths_S), self.repeats, heads, width, self.device)

    def own_merge(self, heads: int, width: int, dtype: torch.dtype) -> int:
        """How many heads' keys of the rows lie side by side."""
        return (
            1 if is_compiled(width, dtype, self.device) else merged_heads(self.num_rows, 1, heads, width, self.device)
        )

    def _tensor(self, values: Integers) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)


# ---------------------------------------------------------------- new blocks
def block_of_prompts(
    states: Mapping[int, tuple[Tensor, Tensor]], starts_S: Integers, lengths_S: Integers, counts_S: Sequence[int],
    room: int,
) -> Block:  # fmt: skip
    """Rows that begin: `counts_S` of each prompt.

    `states`: keys and values of each layer, [heads, tokens, width]; `starts_S` and `lengths_S`: where the prompts are
    among the tokens; `room`: own tokens that fit at first."""
    device = next(iter(states.values()))[0].device
    row_slot = np.repeat(np.arange(len(lengths_S)), counts_S)
    block = Block({}, lengths_S, row_slot, np.zeros(len(row_slot), dtype=np.int64), device)
    column_P = np.arange(block.prompt_width)
    index = np.where(column_P < lengths_S[:, None], starts_S[:, None] + column_P, 0)
    index_SP = torch.from_numpy(index).to(device)
    for number, (keys, values) in states.items():
        heads, _, width = keys.shape
        merges = (block.prompt_merge(heads, width), block.own_merge(heads, width, compute_dtype(keys)))
        prompt_keys, own_keys = _begin(block, keys[:, index_SP], room, *merges)
        prompt_values, own_values = _begin(block, values[:, index_SP], room, 1, 1)
        block.layers[number] = LayerCache(prompt_keys, prompt_values, own_keys, own_values)
    return block


def _begin(
    block: Block, states_HSPD: Tensor, room: int, prompt_merge: int, own_merge: int
) -> tuple[HeadStore, HeadStore]:
    """Stores of the prompts, and of the rows, which are empty."""
    heads, slots, length, width = states_HSPD.shape
    plain = HeadStore(slots, heads, 0, width, 1, states_HSPD)
    plain.data = states_HSPD.transpose(0, 1).to(compute_dtype(states_HSPD))
    prompts = joined([(plain, length)], length, prompt_merge)
    return prompts, HeadStore(block.num_rows, heads, room, width, own_merge, plain.data)


def joined_blocks(first: Block, second: Block) -> Block:
    """One block of the rows of both, padded to the longer prompt and the longer row."""
    slots = len(first.prompt_lengths_S)
    new = Block(
        {},
        np.concatenate([first.prompt_lengths_S, second.prompt_lengths_S]),
        np.concatenate([first.row_slot_B, second.row_slot_B + slots]),
        np.concatenate([first.lengths_B, second.lengths_B]),
        first.device,
    )
    room = new.held + ROOM_TOKENS
    widths, helds = (first.prompt_width, second.prompt_width), (first.held, second.held)
    for number, a in first.layers.items():
        b, shape = second.layers[number], (a.own_keys.heads, a.own_keys.width)
        keys = zip((a.prompt_keys, b.prompt_keys), widths, strict=True)
        values = zip((a.prompt_values, b.prompt_values), widths, strict=True)
        own_keys = zip((a.own_keys, b.own_keys), helds, strict=True)
        own_values = zip((a.own_values, b.own_values), helds, strict=True)
        new.layers[number] = LayerCache(
            joined(list(keys), new.prompt_width, new.prompt_merge(*shape)),
            joined(list(values), new.prompt_width, 1),
            joined(list(own_keys), room, new.own_merge(*shape, a.own_keys.data.dtype)),
            joined(list(own_values), room, 1),
        )
    return new
