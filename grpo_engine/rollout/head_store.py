"""Keys or values of many sequences, laid out for products with very few queries.

A matrix product of one query with the narrow keys of one head is so small that calling it costs as much as computing
it. On CPUs the keys of two or more such heads therefore lie side by side, and the queries are spread over a block
diagonal of zeros: more is computed than needed, in fewer calls. (Measured at 128 rows, 4 heads of width 32: a third
less time for the scores. Values gain nothing by it.)

Axes: S slots (sequences), R rows that share a slot, N queries that meet the keys of one head, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MERGED_WIDTH = 64
"""Widest keys side by side."""
MERGED_QUERIES = 4
"""Most queries of a head where heads are merged; more of them fill a matrix product by themselves."""
FEW_PRODUCTS = 32
"""So few matrix products that calling them does not matter."""


def merged_heads(num_slots: int, num_queries: int, num_heads: int, width: int, device: torch.device) -> int:
    """Key-value heads that one matrix product computes."""
    if device.type != "cpu" or num_queries > MERGED_QUERIES or num_slots * num_heads <= FEW_PRODUCTS:
        return 1
    return max(n for n in range(1, num_heads + 1) if num_heads % n == 0 and (n == 1 or n * width <= MERGED_WIDTH))


class HeadStore:
    """Keys (or values) of S slots: `data` [S, heads / merge, capacity, merge x width]. What was never written is 0."""

    def __init__(self, slots: int, heads: int, capacity: int, width: int, merge: int, like: Tensor) -> None:
        self.heads, self.width, self.merge = heads, width, merge
        self.data = like.new_zeros(slots, heads // merge, capacity, merge * width)

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        return self.data.shape[2]

    def split(self, num_tokens: int) -> Tensor:
        """View [S, heads / merge, tokens, merge, width]."""
        return torch.unflatten(self.data.narrow(2, 0, num_tokens), 3, (self.merge, self.width))

    def matrices(self, num_tokens: int) -> Tensor:
        """View [S x heads / merge, tokens, merge x width]."""
        return self.data.narrow(2, 0, num_tokens).flatten(0, 1)

    def write(self, tokens_SHQD: Tensor, index: Tensor) -> None:
        """Write Q tokens of every slot to the places `index` (slot, then part, then token) of the flattened store."""
        parts = self.data.shape[1]
        source = torch.unflatten(tokens_SHQD, 1, (parts, self.merge)).transpose(2, 3)
        self.data.view(-1, self.merge * self.width)[index] = source.reshape(-1, self.merge * self.width)

    def place(self, slot: int, split: Tensor) -> None:
        """Copy what another store's `split` gave to the slots from `slot` on, first tokens."""
        slots, _, num_tokens, merge, _ = split.shape
        if merge != self.merge:
            heads_first = split.transpose(2, 3).flatten(1, 2)
            split = torch.unflatten(heads_first, 1, (self.data.shape[1], self.merge)).transpose(2, 3)
        self.split(num_tokens)[slot : slot + slots] = split

    def selected(self, slots: Tensor, num_tokens: int, capacity: int, merge: int) -> HeadStore:
        """The first tokens of some slots, in a store of its own."""
        kept = self.data.narrow(2, 0, min(max(num_tokens, capacity), self.capacity)).index_select(0, slots)
        if merge == self.merge and kept.shape[2] == capacity:
            new = HeadStore(0, self.heads, 0, self.width, merge, self.data)
            new.data = kept
            return new
        new = HeadStore(len(slots), self.heads, capacity, self.width, merge, self.data)
        new.place(0, torch.unflatten(kept.narrow(2, 0, num_tokens), 3, (self.merge, self.width)))
        return new


def joined(stores: Sequence[tuple[HeadStore, int]], capacity: int, merge: int) -> HeadStore:
    """The slots of all stores, the first tokens (their number beside each store) of each."""
    first = stores[0][0]
    slots = sum(store.data.shape[0] for store, _ in stores)
    new, slot = HeadStore(slots, first.heads, capacity, first.width, merge, first.data), 0
    for store, num_tokens in stores:
        new.place(slot, store.split(num_tokens))
        slot += store.data.shape[0]
    return new


# ---------------------------------------------------------------- products
def spread(queries_SRHND: Tensor, merge: int) -> Tensor:
    """Queries as the left side of a product with `matrices`: [S x heads / merge, merge x R x N, merge x width], zero
    where a query meets the keys of another head."""
    slots, repeats, heads, num, width = queries_SRHND.shape
    if merge == 1:
        return queries_SRHND.transpose(1, 2).reshape(slots * heads, repeats * num, width)
    blocks = queries_SRHND.new_zeros(slots, heads // merge, merge, repeats, num, merge, width)
    diagonal = blocks.diagonal(dim1=2, dim2=5)  # [S, heads / merge, R, N, width, merge]
    diagonal.copy_(torch.unflatten(queries_SRHND, 2, (heads // merge, merge)).permute(0, 2, 1, 4, 5, 3))
    return blocks.view(slots * (heads // merge), merge * repeats * num, merge * width)


def scores(queries_SRHND: Tensor, keys: HeadStore, num_tokens: int, scale: float) -> Tensor:
    """[S, heads, R, N, T]: scale times query times key, for the first tokens of each slot."""
    slots, repeats, heads, num, _ = queries_SRHND.shape
    left, right = spread(queries_SRHND, keys.merge), keys.matrices(num_tokens).transpose(1, 2)
    product = torch.baddbmm(left.new_zeros(1, 1, 1), left, right, beta=0, alpha=scale)
    return product.view(slots, heads, repeats, num, num_tokens)


def mixed(weights_SHRNT: Tensor, values: HeadStore) -> Tensor:
    """[S, heads, R, N, width]: sum over the first T tokens of weight times value. Heads are not merged."""
    num_tokens = weights_SHRNT.shape[-1]
    left = weights_SHRNT.reshape(len(weights_SHRNT) * values.heads, -1, num_tokens)
    return torch.bmm(left, values.matrices(num_tokens)).view(*weights_SHRNT.shape[:-1], values.width)
