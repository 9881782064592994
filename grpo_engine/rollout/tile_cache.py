"""A layer's keys and values, attended to in C (rollout/native/attend.c).

They lie in tiles of 16 tokens; a tile holds those of all sequences, one after another. So a step reads without the gaps
that sequences leave which are kept apart and may grow: processors read ahead, and every gap ends that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional

from grpo_engine.rollout.arrangement import Arrangement
from grpo_engine.rollout.native.attend import LANES, attend, padded


class Tiles:
    """Keys and values of S sequences: of each 16 tokens a tensor [S, heads, 2, 16 x W], W the width padded to a
    multiple of 16. First the keys, [W, 16], then the values, [16, W]. What was never written may be anything."""

    def __init__(self, sequences: int, heads: int, width: int, tiles: Iterable[Tensor] = ()) -> None:
        self.sequences, self.heads, self.width = sequences, heads, width
        self._tiles = list(tiles)
        self._addresses: ctypes.Array[ctypes.c_void_p] | None = None

    @staticmethod
    def filled(keys_HSTD: Tensor, values_HSTD: Tensor) -> Tiles:
        """Of sequences padded to T tokens."""
        heads, sequences, num_tokens, width = keys_HSTD.shape
        padding = (0, padded(width) - width, 0, padded(num_tokens) - num_tokens)
        keys, values = (
            torch.unflatten(functional.pad(states, padding), 2, (-1, LANES)).permute(2, 1, 0, 3, 4)
            for states in (keys_HSTD, values_HSTD)
        )
        both = torch.stack([keys.transpose(3, 4).flatten(3), values.flatten(3)], dim=3)
        return Tiles(sequences, heads, width, both.unbind(0))

    @property
    def num_tokens(self) -> int:
        """Tokens that fit."""
        return LANES * len(self._tiles)

    def addresses(self) -> ctypes.Array[ctypes.c_void_p]:
        """Of the tiles."""
        if self._addresses is None:
            found = [tile.data_ptr() for tile in self._tiles]
            self._addresses = (ctypes.c_void_p * len(found))(*found)
        return self._addresses

    def grow(self, num_tokens: int) -> None:
        """Until so many tokens fit."""
        while self.num_tokens < num_tokens:
            shape = (self.sequences, self.heads, 2, LANES * padded(self.width))
            self._tiles.append(torch.empty(shape, dtype=torch.float32, device="cpu"))
            self._addresses = None

    def selected(self, sequences: Tensor, num_tokens: int) -> Tiles:
        """The first tokens of some sequences."""
        kept = self._tiles[: padded(num_tokens) // LANES]
        return Tiles(len(sequences), self.heads, self.width, (tile.index_select(0, sequences) for tile in kept))

    @staticmethod
    def joined(parts: Iterable[Tiles]) -> Tiles:
        """The sequences of all parts, one part after another; the shorter parts grow."""
        parts = list(parts)
        longest = max(part.num_tokens for part in parts)
        for part in parts:
            part.grow(longest)
        tiles = (torch.cat(same) for same in zip(*(part._tiles for part in parts), strict=True))
        return Tiles(sum(part.sequences for part in parts), parts[0].heads, parts[0].width, tiles)


class TileCache:
    """Implements LayerCache for float32 on CPUs that have a C compiler."""

    def __init__(self, prompts: Tiles, own: Tiles) -> None:
        self.prompts, self.own = prompts, own

    @staticmethod
    def of_prompts(rows: Arrangement, keys_HSPD: Tensor, values_HSPD: Tensor) -> TileCache:
        """Rows that hold no token of their own yet."""
        prompts = Tiles.filled(keys_HSPD, values_HSPD)
        return TileCache(prompts, Tiles(rows.num_rows, prompts.heads, prompts.width))

    def make_room(self, rows: Arrangement) -> None:
        """For the new tokens."""
        self.own.grow(rows.held + rows.num_tokens)

    def attend(
        self, rows: Arrangement, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Take in keys and values [B, heads, Q, width]; queries of the same form to attention [B, Q, heads, width]."""
        prompts = (self.prompts.addresses(), rows.prompts_S, rows.first_row_S1)
        return attend(query, key, value, prompts, self.own.addresses(), rows.held_B(), scale, window)

    def selected(self, old: Arrangement, new: Arrangement, slots: Tensor, row_index: Tensor) -> TileCache:
        """Of some slots and rows."""
        prompts = self.prompts
        if new.num_slots < old.num_slots:
            prompts = prompts.selected(slots, new.prompt_width)
        return TileCache(prompts, self.own.selected(row_index, new.held))

    @staticmethod
    def joined(parts: Iterable[tuple[TileCache, Arrangement]], new: Arrangement) -> TileCache:
        """The slots and rows of all parts, one part after another."""
        caches = [cache for cache, _ in parts]
        return TileCache(Tiles.joined(cache.prompts for cache in caches), Tiles.joined(cache.own for cache in caches))
