"""The C loops, called on tensors."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from grpo_engine.rollout.native.compiled import library

WIDTHS = (8, 16, 32, 64, 96, 128)
"""Of heads that are compiled."""
FEW_NUMBERS = 1 << 20
"""Room for so many keys is read by one thread."""
MOST_QUERIES = 8
"""Of one key-value head; matrix products with more are quick."""


class _Work(ctypes.Structure):
    """`Work` of attend.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("queries", "new_keys", "new_values")),
        *((name, ctypes.c_int64 * 3) for name in ("key_strides", "value_strides")),
        *((name, ctypes.c_void_p) for name in ("keys", "values", "held", "prompt", "place", "shared", "out")),
        *((name, ctypes.c_int64) for name in "HNQCPR"),
        ("scale", ctypes.c_float),
    )  # fmt: skip


def is_compiled(width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there are loops for keys and values of heads so wide."""
    return device.type == "cpu" and dtype == torch.float32 and width in WIDTHS and library() is not None


def attend(
    queries_BHND: Tensor, new_keys_BHQD: Tensor, new_values_BHQD: Tensor, keys_BHCD: Tensor, values_BHCD: Tensor,
    held_B: Tensor, prompt_B: Tensor, place_B: Tensor, shared_SHRNP: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """Attention to each row's own tokens, [S, H, R, N, D]; `shared_SHRNP`, scaled scores over the prompts, become
    weights (one softmax over both), 0 behind a prompt's end.

    The new keys and values are first written behind the `held_B` tokens of each row. Query n is that of new token
    n % Q and sees no later one. Row b continues a prompt of prompt_B[b] tokens and is place_B[b] in [S x R]; places
    without a row stay 0. All float32 and int64, contiguous but for the new keys and values.

    Raises MemoryError."""
    # The loops trust what they are given: a stride too many would read other rows' memory.
    new_keys_BHQD, new_values_BHQD = (
        new if new.stride(-1) == 1 else new.contiguous() for new in (new_keys_BHQD, new_values_BHQD)
    )
    rows, heads, num, width = queries_BHND.shape
    slots, _, repeats, _, prompt = shared_SHRNP.shape
    new = torch.empty if rows == slots * repeats else torch.zeros
    out_SHRND = new(slots, heads, repeats, num, width)
    work = _Work(
        queries_BHND.data_ptr(), new_keys_BHQD.data_ptr(), new_values_BHQD.data_ptr(),
        (ctypes.c_int64 * 3)(*new_keys_BHQD.stride()[:3]), (ctypes.c_int64 * 3)(*new_values_BHQD.stride()[:3]),
        keys_BHCD.data_ptr(), values_BHCD.data_ptr(), held_B.data_ptr(), prompt_B.data_ptr(), place_B.data_ptr(),
        shared_SHRNP.data_ptr(), out_SHRND.data_ptr(),
        heads, num, new_keys_BHQD.shape[2], keys_BHCD.shape[2], prompt, repeats, scale,
    )  # fmt: skip
    native = library()
    assert native is not None, "is_compiled says whether there is a library"
    threads = min(torch.get_num_threads(), rows) if keys_BHCD.numel() > FEW_NUMBERS else 1
    if threads == 1:
        results = [native.attend(ctypes.byref(work), width, 0, rows)]
    else:
        bounds = [rows * part // threads for part in range(threads + 1)]
        parts = _pool(threads).map(lambda part: native.attend(ctypes.byref(work), width, *part), pairwise(bounds))
        results = list(parts)
    if any(results):
        raise MemoryError(f"no memory for the scores of {keys_BHCD.shape[2]:,} tokens")
    return out_SHRND


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="attend")
