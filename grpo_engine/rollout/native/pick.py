"""Tokens and their log-probabilities from logits, in C (pick.c), called on tensors."""

from __future__ import annotations

import ctypes
from functools import partial

import torch
from torch import Tensor

from grpo_engine.rollout.native.compiled import library
from grpo_engine.rollout.native.threads import in_threads

BLOCK = 128
"""As in pick.c, which writes a sum for each so many ids."""
FEW_LOGITS = 1 << 18
"""So many are gone through by one thread."""


class _Pick(ctypes.Structure):
    """`Pick` of pick.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "kept", "uniforms", "sums", "tokens", "logprobs", "full")),
        ("all", ctypes.c_void_p), ("V", ctypes.c_int64),
    )  # fmt: skip


def pick(
    scaled_BV: Tensor, kept_BV: Tensor | None, uniforms_B: Tensor | None, *, with_all: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor | None] | None:
    """Tokens [B] by inverse distribution at `uniforms_B` (float64 in [0, 1)), the likeliest where it is None; their
    float32 log-probabilities under the distribution sampled from and without truncation; with_all: [B, V] those of all
    ids as sampled from, minus infinity where an id is not kept.

    `scaled_BV` float32, divided by the temperature; `kept_BV` bool, None = all are kept. None for anything but float32
    on the CPU, and without a C compiler. A row with NaN or plus infinity has log-probabilities that are NaN.

    Raises TypeError for other masks and numbers, ValueError for an empty vocabulary."""
    native = library() if scaled_BV.device.type == "cpu" and scaled_BV.dtype == torch.float32 else None
    if native is None:
        return None
    # The loops trust what they are given.
    if kept_BV is not None and (kept_BV.dtype != torch.bool or kept_BV.shape != scaled_BV.shape):
        raise TypeError(f"a mask in C is bool of {list(scaled_BV.shape)}, not {kept_BV.dtype} {list(kept_BV.shape)}")
    if uniforms_B is not None and (uniforms_B.dtype != torch.float64 or uniforms_B.shape != scaled_BV.shape[:1]):
        raise TypeError(f"numbers in C are float64 of {list(scaled_BV.shape[:1])}, not {uniforms_B.dtype}")
    rows, vocabulary = scaled_BV.shape
    if vocabulary == 0:
        raise ValueError("no token can be picked from an empty vocabulary")
    scaled_BV = scaled_BV.contiguous()
    kept_BV, uniforms_B = (given if given is None else given.contiguous() for given in (kept_BV, uniforms_B))
    sums_BN = torch.empty(rows, -(-vocabulary // BLOCK), dtype=torch.float64, device="cpu")
    tokens_B = torch.empty(rows, dtype=torch.long, device="cpu")
    logprobs_2B = torch.empty(2, rows, dtype=torch.float32, device="cpu")
    all_BV = torch.empty_like(scaled_BV) if with_all else None
    logprobs_B, full_B = logprobs_2B.unbind()
    arrays = (scaled_BV, kept_BV, uniforms_B, sums_BN, tokens_B, logprobs_B, full_B, all_BV)
    work = _Pick(*(None if array is None else array.data_ptr() for array in arrays), vocabulary)
    in_threads(partial(native.pick_tokens, ctypes.byref(work)), rows, is_much=rows * vocabulary > FEW_LOGITS)
    return tokens_B, logprobs_B, full_B, all_BV
