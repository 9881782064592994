"""A layer's keys and values, attended to by matrix products.

The scores of all rows of a group over their prompt are one product, those over each row's own tokens another. Both meet
in one softmax, in float32, so that the result is ordinary attention.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from grpo_engine.rollout.arrangement import Arrangement
from grpo_engine.rollout.head_store import HeadStore, joined, merged_heads, mixed, scores

ROOM_TOKENS = 64
"""Tokens a row by which caches grow, at least."""


class ProductCache:
    """Implements LayerCache on any device and in any type."""

    def __init__(
        self, prompt_keys: HeadStore, prompt_values: HeadStore, own_keys: HeadStore, own_values: HeadStore
    ) -> None:
        self.prompt_keys, self.prompt_values = prompt_keys, prompt_values
        self.own_keys, self.own_values = own_keys, own_values

    @staticmethod
    def of_prompts(rows: Arrangement, keys_HSPD: Tensor, values_HSPD: Tensor, room: int) -> ProductCache:
        """Rows that hold no token of their own yet; `room` of them fit."""
        heads, _, width, size = keys_HSPD.shape

        def stores(states_HSPD: Tensor, prompt_merge: int, own_merge: int) -> tuple[HeadStore, HeadStore]:
            own_size = states_HSPD.shape[3]  # values may be of another width than keys
            plain = HeadStore(rows.num_slots, heads, 0, own_size, 1, states_HSPD)
            plain.data = states_HSPD.transpose(0, 1)
            prompts = joined([(plain, width)], width, prompt_merge)
            return prompts, HeadStore(rows.num_rows, heads, room, own_size, own_merge, plain.data)

        prompt_keys, own_keys = stores(keys_HSPD, _prompt_merge(rows, heads, size), _own_merge(rows, heads, size))
        prompt_values, own_values = stores(values_HSPD, 1, 1)
        return ProductCache(prompt_keys, prompt_values, own_keys, own_values)

    # ---------------------------------------------------------------- a step
    def make_room(self, rows: Arrangement) -> None:
        """For the new tokens."""
        needed = rows.held + rows.num_tokens
        if self.own_keys.capacity < needed:
            room = needed + max(ROOM_TOKENS, needed // 4)
            self.own_keys = joined([(self.own_keys, rows.held)], room, self.own_keys.merge)
            self.own_values = joined([(self.own_values, rows.held)], room, self.own_values.merge)

    def attend(
        self, rows: Arrangement, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Take in keys and values [B, heads, Q, width]; queries of the same form to attention [B, Q, heads, width]."""
        for new, store in ((key, self.own_keys), (value, self.own_values)):
            store.write(new, rows.index(store.data.shape[1], store.capacity))
        # The queries that meet one key-value head are neighbours: [B, heads, N, width].
        queries = torch.unflatten(query, 1, (key.shape[1], -1)).flatten(2, 3)
        weights, width = self._weights(rows, queries, scale, window), rows.prompt_width
        own = mixed(weights[:, :, None, :, width:], self.own_values)[:, :, 0]
        shared = rows.by_slot(weights[..., :width]).transpose(1, 2)
        output = own + rows.by_row(mixed(shared, self.prompt_values).transpose(1, 2))
        return torch.unflatten(output, 2, (-1, rows.num_tokens)).permute(0, 3, 1, 2, 4).flatten(2, 3)

    def _weights(self, rows: Arrangement, queries: Tensor, scale: float, window: int | None) -> Tensor:
        """[B, heads, N, P + T]: attention to the row's prompt and its own tokens."""
        num_tokens = rows.num_tokens
        shared = scores(rows.by_slot(queries), self.prompt_keys, rows.prompt_width, scale)
        own = scores(queries[:, None], self.own_keys, rows.held + num_tokens, scale)[:, :, 0]
        joint = torch.cat([rows.by_row(shared.transpose(1, 2)), own], -1)
        bias = rows.bias(window)
        if bias is not None:
            torch.unflatten(joint, 2, (-1, num_tokens)).add_(bias)
        return torch.softmax(joint, -1, dtype=torch.float32).to(queries.dtype)

    # ---------------------------------------------------------------- rows that leave and come
    def selected(self, old: Arrangement, new: Arrangement, slots: Tensor, row_index: Tensor) -> ProductCache:
        """Of some slots and rows."""
        prompt_keys, prompt_values = self.prompt_keys, self.prompt_values
        heads, size = prompt_keys.heads, prompt_keys.width
        if new.num_slots < old.num_slots:
            width = new.prompt_width
            prompt_keys = prompt_keys.selected(slots, width, width, _prompt_merge(new, heads, size))
            prompt_values = prompt_values.selected(slots, width, width, 1)
        held, room = new.held, min(self.own_keys.capacity, new.held + ROOM_TOKENS)
        own_keys = self.own_keys.selected(row_index, held, room, _own_merge(new, heads, size))
        return ProductCache(prompt_keys, prompt_values, own_keys, self.own_values.selected(row_index, held, room, 1))

    @staticmethod
    def joined(parts: Iterable[tuple[ProductCache, Arrangement]], new: Arrangement) -> ProductCache:
        """The slots and rows of all parts, padded to the longest prompt and the longest row."""
        caches, olds = zip(*parts, strict=True)
        heads, size = caches[0].own_keys.heads, caches[0].own_keys.width
        widths, helds = [old.prompt_width for old in olds], [old.held for old in olds]
        width, room = new.prompt_width, new.held + ROOM_TOKENS
        prompt_keys = zip((cache.prompt_keys for cache in caches), widths, strict=True)
        prompt_values = zip((cache.prompt_values for cache in caches), widths, strict=True)
        own_keys = zip((cache.own_keys for cache in caches), helds, strict=True)
        own_values = zip((cache.own_values for cache in caches), helds, strict=True)
        return ProductCache(
            joined(list(prompt_keys), width, _prompt_merge(new, heads, size)),
            joined(list(prompt_values), width, 1),
            joined(list(own_keys), room, _own_merge(new, heads, size)),
            joined(list(own_values), room, 1),
        )


def _prompt_merge(rows: Arrangement, heads: int, width: int) -> int:
    """How many heads' keys of the prompts lie side by side."""
    return merged_heads(rows.num_slots, rows.repeats, heads, width, rows.device)


def _own_merge(rows: Arrangement, heads: int, width: int) -> int:
    """How many heads' keys of the rows lie side by side."""
    return merged_heads(rows.num_rows, 1, heads, width, rows.device)
