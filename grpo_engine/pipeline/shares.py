"""Which rank does what. Pure functions of the whole batch, so that all ranks agree without talking."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from grpo_engine.types import TrainRow

BALANCED = 1.05
"""Whole groups stay on one rank while the fullest rank has at most this many times the mean."""


def contiguous_share(count: int, rank: int, world_size: int) -> range:
    """The rank's part of `count` things in order; parts differ by one at most.

    Example: [contiguous_share(5, r, 2) for r in (0, 1)] == [range(0, 3), range(3, 5)]"""
    size, extra = divmod(count, world_size)
    start = rank * size + min(rank, extra)
    return range(start, start + size + (rank < extra))


def split_evenly(count: int, parts: int) -> list[range]:
    return [contiguous_share(count, part, parts) for part in range(parts)]


def row_share(rows: Sequence[TrainRow], rank: int, world_size: int) -> list[TrainRow]:
    """The rows whose gradient this rank computes, balanced by tokens.

    Rows of one prompt stay together, since a micro-batch then holds the prompt once, unless that unbalances the ranks.
    Whatever the shares, the sum over ranks is the same gradient."""
    if world_size == 1:
        return list(rows)
    indices = [[index for index, _ in run] for _, run in groupby(enumerate(rows), key=lambda item: item[1].prompt_ids)]
    shares, loads = _balance(rows, indices, world_size)
    if max(loads) > BALANCED * sum(loads) / world_size:
        shares, _ = _balance(rows, [[index] for index in range(len(rows))], world_size)
    return [rows[index] for index in sorted(shares[rank])]


def _balance(rows: Sequence[TrainRow], runs: list[list[int]], world_size: int) -> tuple[list[list[int]], list[int]]:
    """Longest first, each to the rank with the least so far."""
    costs = [sum(_tokens(rows[index]) for index in run) for run in runs]
    shares: list[list[int]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for run in sorted(range(len(runs)), key=lambda run: -costs[run]):
        emptiest = loads.index(min(loads))
        shares[emptiest].extend(runs[run])
        loads[emptiest] += costs[run]
    return shares, loads


def _tokens(row: TrainRow) -> int:
    return len(row.prompt_ids) + len(row.completion_ids)
