"""The C loops, called on tensors."""

from __future__ import annotations

import ctypes
from functools import partial

import torch
from torch import Tensor

from grpo_engine.rollout.native.compiled import library
from grpo_engine.rollout.native.threads import in_threads

LANES = 16
"""Tokens of a tile, and what widths are padded to."""
FEW_NUMBERS = 1 << 20
"""So many keys and values are read by one thread."""
EVERYTHING = 1 << 62
"""A window that cuts nothing off."""

Addresses = ctypes.Array[ctypes.c_void_p]


class _Work(ctypes.Structure):
    """`Work` of attend.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("queries", "keys", "values")),
        *((name, ctypes.c_int64 * 3) for name in ("query_strides", "key_strides", "value_strides")),
        *((name, ctypes.c_void_p) for name in ("prompt_tiles", "own_tiles", "prompt", "first", "held", "out")),
        *((name, ctypes.c_int64) for name in (*"SHGQD", "window")),
        ("scale", ctypes.c_float),
    )  # fmt: skip


def padded(count: int) -> int:
    """Rounded up to a multiple of 16."""
    return -(-count // LANES) * LANES


def is_compiled(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there are loops for such keys and values."""
    return device.type == "cpu" and dtype == torch.float32 and library() is not None


def attend(
    query_BhQD: Tensor, key_BHQD: Tensor, value_BHQD: Tensor, prompts: tuple[Addresses, Tensor, Tensor],
    own_tiles: Addresses, held_B: Tensor, scale: float, window: int | None,
) -> Tensor:  # fmt: skip
    """Attention of Q new tokens of B rows to their prompts, their own tokens and each other, [B, Q, heads, D].

    `prompts`: tiles of S prompts, [S] their tokens and [S + 1] the first row that continues each, then B; `own_tiles`:
    those of the rows, which hold `held_B` tokens and have room for Q more, where the new keys and values are written
    (tile_cache.Tiles). G neighbouring heads of the queries meet one of the keys. With a window a query sees so many
    tokens at most, its own included. Everything float32 and int64, on the CPU.

    Raises MemoryError, and TypeError for other types."""
    # The loops trust what they are given: a stride too many would read other rows' memory.
    if any(new.dtype != torch.float32 for new in (query_BhQD, key_BHQD, value_BHQD)):
        raise TypeError(f"attention in C is float32, not {query_BhQD.dtype}, {key_BHQD.dtype}, {value_BHQD.dtype}")
    query_BhQD, key_BHQD, value_BHQD = (
        new if new.stride(-1) == 1 else new.contiguous() for new in (query_BhQD, key_BHQD, value_BHQD)
    )
    rows, query_heads, num_new, width = query_BhQD.shape
    heads, (prompt_tiles, prompt_S, first_S1) = key_BHQD.shape[1], prompts
    out_BQhD = torch.empty((rows, num_new, query_heads, width), dtype=torch.float32, device="cpu")
    strides = ctypes.c_int64 * 3
    work = _Work(
        query_BhQD.data_ptr(), key_BHQD.data_ptr(), value_BHQD.data_ptr(),
        strides(*query_BhQD.stride()[:3]), strides(*key_BHQD.stride()[:3]), strides(*value_BHQD.stride()[:3]),
        ctypes.addressof(prompt_tiles), ctypes.addressof(own_tiles), prompt_S.data_ptr(), first_S1.data_ptr(),
        held_B.data_ptr(), out_BQhD.data_ptr(),
        len(prompt_S), heads, query_heads // heads, num_new, width, EVERYTHING if window is None else window, scale,
    )  # fmt: skip
    native = library()
    assert native is not None, "is_compiled says whether there is a library"
    numbers = 2 * rows * heads * width * LANES * (len(prompt_tiles) + len(own_tiles))
    results = in_threads(partial(native.attend, ctypes.byref(work)), rows, is_much=numbers > FEW_NUMBERS)
    if any(results):
        raise MemoryError(f"no memory for the attention of {rows:,} rows, {query_heads} heads of width {width}")
    return out_BQhD
