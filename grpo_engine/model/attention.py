"""Attention without padding: many rows in one sequence, each attending to itself only.

A packed batch is one sequence of N tokens, so that every dense layer computes on real tokens alone. Only inside
attention are rows laid out again: rows of similar length form a bucket [rows, width], padded on the right, where causal
queries never see the padding, so that no mask is needed. Rows that share a prompt share its tokens in the dense layers
and repeat them here; gradients of the copies add up in a fixed order, without atomics.

The function is registered with transformers under IMPLEMENTATION and stays set on the model for good: gradient
checkpointing calls layers again in the backward pass. The layout travels as a keyword argument. The sampler passes an
object that holds its rows' keys and values instead (rollout/rows.py); a call without either is plain SDPA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

IMPLEMENTATION = "cohort_packed"
LAYOUT_ARGUMENT = "packed_layout"
CACHE_ARGUMENT = "attention_cache"
CALL_COST_TOKENS = 48.0
"""What one more call of SDPA costs, in tokens of padding that could be computed instead."""
QUADRATIC_TOKENS = 256.0
"""Width at which a token's scores cost as much as everything else that attention does with it."""
UNCLEAR_ARGUMENTS = ("position_bias", "cache")
"""Arguments of transformers' SDPA function that change its result and that rows in buckets do not support."""

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where the N tokens of a packed sequence sit in the S slots of its buckets, one bucket after the other."""

    shapes: tuple[tuple[int, int], ...]
    """(rows, width) of each bucket; rows x width sum to S."""
    token_S: Tensor
    """Token of each slot; 0 in padding."""
    slot_N: Tensor
    """One slot of each token: where its attention output is read."""
    copies: tuple[Tensor, Tensor] | None
    """Slots ordered by token, and [N] where each token's begin; None while every token has one slot only."""
    bands: dict[tuple[int, int, torch.device], Tensor] = field(default_factory=dict)
    """Masks by (width, window, device), built when a layer first asks."""
    windows: set[int | None] = field(default_factory=set)
    """Sliding windows that layers have asked for."""

    def band(self, width: int, window: int, device: torch.device) -> Tensor | None:
        """[width, width] bool, True where a query may look; None when the window covers the whole bucket."""
        if window >= width:
            return None
        key = (width, window, device)
        if key not in self.bands:
            distance = torch.arange(width, device=device)[:, None] - torch.arange(width, device=device)
            self.bands[key] = (distance >= 0) & (distance < window)
        return self.bands[key]


class AttentionCache(Protocol):
    """What a sampler keeps between forward passes, in place of transformers' cache."""

    def attend(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float | None,
        window: int | None,
    ) -> Tensor:  # fmt: skip
        """Attention of a layer's new tokens, [B, heads, Q, width], to those kept and to each other: [B, Q, heads,
        width]."""
        ...


# ---------------------------------------------------------------- layout
def bucket_sizes(lengths: Sequence[int]) -> list[int]:
    """Rows of each bucket, for row lengths in descending order: the cheapest cut into runs of neighbours.

    A bucket costs a call and, for each row, its width and its width squared."""
    length_B = np.asarray(lengths, dtype=np.float64)
    starts, counts = _runs(length_B)
    width_U = length_B[starts]
    price_U = width_U * (1.0 + width_U / QUADRATIC_TOKENS)
    ends = np.append(starts, len(length_B))
    best, previous = np.zeros(len(starts) + 1), np.zeros(len(starts) + 1, dtype=np.int64)
    for end in range(1, len(starts) + 1):
        cost = best[:end] + CALL_COST_TOKENS + (ends[end] - starts[:end]) * price_U[:end]
        previous[end] = cost.argmin()
        best[end] = cost[previous[end]]
    sizes, end = [], len(counts)
    while end > 0:
        start = int(previous[end])
        sizes.append(int(ends[end] - starts[start]))
        end = start
    return sizes[::-1]


@dataclass(frozen=True, slots=True)
class Buckets:
    """A layout on the host."""

    shapes: tuple[tuple[int, int], ...]
    token_S: Integers
    """Token of each slot, -1 in padding."""
    slot_N: Integers
    position_N: Integers
    """Each token's position in its row."""


def build_buckets(
    prompt_start_B: Integers, prompt_length_B: Integers, rest_start_B: Integers, length_B: Integers, num_tokens: int
) -> Buckets:
    """Buckets of B rows in a sequence of N tokens.

    Row b is the `prompt_length_B[b]` tokens from `prompt_start_B[b]` and then those from `rest_start_B[b]`, in all
    `length_B[b]` > 0; rows may share prompt tokens."""
    order = np.argsort(-length_B, kind="stable")
    shapes, tokens = [], []
    position_N, first = np.zeros(num_tokens, dtype=np.int64), 0
    for size in bucket_sizes(length_B[order].tolist()):
        rows = order[first : first + size, None]
        position_W = np.arange(length_B[order[first]])
        from_prompt = prompt_start_B[rows] + position_W
        from_rest = (rest_start_B - prompt_length_B)[rows] + position_W
        token_RW = np.where(position_W < prompt_length_B[rows], from_prompt, from_rest)
        real_RW = position_W < length_B[rows]
        position_N[token_RW[real_RW]] = np.broadcast_to(position_W, token_RW.shape)[real_RW]
        shapes.append((size, len(position_W)))
        tokens.append(np.where(real_RW, token_RW, -1).ravel())
        first += size
    token_S = np.concatenate(tokens)
    slots = np.flatnonzero(token_S >= 0)
    slot_N = np.zeros(num_tokens, dtype=np.int64)
    slot_N[token_S[slots]] = slots
    return Buckets(tuple(shapes), token_S, slot_N, position_N)


def layout_to(buckets: Buckets, device: torch.device) -> PackedLayout:
    """The layout as tensors on `device`."""
    token_S, num_tokens = buckets.token_S, len(buckets.slot_N)
    slots = np.flatnonzero(token_S >= 0)
    copies = None
    if len(slots) > num_tokens:
        by_token = slots[np.argsort(token_S[slots], kind="stable")]
        counts_N = np.bincount(token_S[slots], minlength=num_tokens)
        begins_N = counts_N.cumsum() - counts_N
        copies = (torch.from_numpy(by_token).to(device), torch.from_numpy(begins_N).to(device))
    token = torch.from_numpy(np.maximum(token_S, 0)).to(device)
    return PackedLayout(buckets.shapes, token, torch.from_numpy(buckets.slot_N).to(device), copies)


def _runs(values: npt.NDArray[np.float64]) -> tuple[Integers, Integers]:
    """Starts and lengths of the runs of equal values."""
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    return starts, np.diff(np.append(starts, len(values)))


# ---------------------------------------------------------------- gather and scatter
class _ToSlots(torch.autograd.Function):
    """[N, F] tokens to [S, F] slots; the gradients of a token's copies add up."""

    @staticmethod
    def forward(ctx: Any, tokens_NF: Tensor, layout: PackedLayout) -> Tensor:
        ctx.layout = layout
        return tokens_NF.index_select(0, layout.token_S)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient_SF,) = gradients
        layout = ctx.layout
        if layout.copies is None:
            return gradient_SF.index_select(0, layout.slot_N), None
        slots, begins_N = layout.copies
        return functional.embedding_bag(slots, gradient_SF, begins_N, mode="sum"), None


class _FromSlots(torch.autograd.Function):
    """[S, F] slots to [N, F] tokens, each read from one slot."""

    @staticmethod
    def forward(ctx: Any, slots_SF: Tensor, layout: PackedLayout) -> Tensor:
        ctx.layout, ctx.num_slots = layout, slots_SF.shape[0]
        return slots_SF.index_select(0, layout.slot_N)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient_NF,) = gradients
        gradient_SF = gradient_NF.new_zeros(ctx.num_slots, gradient_NF.shape[1])
        return gradient_SF.index_copy_(0, ctx.layout.slot_N, gradient_NF), None


# ---------------------------------------------------------------- the attention function
def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    packed_layout: PackedLayout | None = None,
    attention_cache: AttentionCache | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query, key, value [1, heads, N, width] to [1, N, heads, width], or what the cache makes of them; without layout
    and cache, transformers' SDPA.

    Raises ValueError for attention that is not causal or has a position bias, which neither of them supports."""
    if packed_layout is None and attention_cache is None:
        kwargs |= {"scaling": scaling, "sliding_window": sliding_window, "is_causal": is_causal}
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, **kwargs)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if not causal or any(kwargs.get(name) is not None for name in UNCLEAR_ARGUMENTS):
        raise ValueError("packed and cached attention are causal and take no position bias")
    if attention_cache is not None:
        return attention_cache.attend(module, query, key, value, scaling, sliding_window), None
    assert packed_layout is not None
    packed_layout.windows.add(sliding_window)
    dtype = compute_dtype(query)
    buckets = zip(*(_buckets(tensor.to(dtype), packed_layout) for tensor in (query, key, value)), strict=True)
    outputs = []
    with torch.autocast(query.device.type, enabled=False):
        for (_, width), (q, k, v) in zip(packed_layout.shapes, buckets, strict=True):
            band = None if sliding_window is None else packed_layout.band(width, sliding_window, q.device)
            outputs.append(_attend(q, k, v, band, dropout, scaling).transpose(1, 2).flatten(2).flatten(0, 1))
    output_SF = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    output_NF: Tensor = _FromSlots.apply(output_SF, packed_layout)  # type: ignore[no-untyped-call]
    return output_NF.view(1, len(output_NF), query.shape[1], -1), None


def _attend(q: Tensor, k: Tensor, v: Tensor, band: Tensor | None, dropout: float, scaling: float | None) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    if band is not None and groups > 1:  # with a mask, CUDA has no fused kernel for grouped queries
        k, v, groups = repeat_kv(k, groups), repeat_kv(v, groups), 1
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=band, dropout_p=dropout, is_causal=band is None, scale=scaling, enable_gqa=groups > 1
    )


def compute_dtype(query: Tensor) -> torch.dtype:
    """bfloat16 under autocast on an accelerator. On CPUs its backward kernel is several times slower than float32."""
    device = query.device.type
    if not torch.is_autocast_enabled(device):
        return query.dtype
    return torch.float32 if device == "cpu" else torch.get_autocast_dtype(device)


def _buckets(tensor: Tensor, layout: PackedLayout) -> list[Tensor]:
    """[1, heads, N, width] to [rows, heads, bucket width, width] of each bucket."""
    heads, width = tensor.shape[1], tensor.shape[3]
    slots_SF: Tensor = _ToSlots.apply(tensor[0].transpose(0, 1).flatten(1), layout)  # type: ignore[no-untyped-call]
    # Split, not slices: the backward pass of each slice would fill a tensor of all slots.
    parts = torch.split(slots_SF, [rows * columns for rows, columns in layout.shapes])
    return [
        part.view(rows, columns, heads, width).transpose(1, 2)
        for part, (rows, columns) in zip(parts, layout.shapes, strict=True)
    ]


# ---------------------------------------------------------------- registration
def use_packed_attention(model: PreTrainedModel) -> bool:
    """Set the implementation on a model that computes with SDPA; False (and nothing changed) for any other."""
    if has_packed_attention(model):
        return True
    config: Any = model.config.get_text_config()
    if config._attn_implementation != "sdpa" or not model._can_set_attn_implementation():
        return False
    AttentionInterface.register(IMPLEMENTATION, packed_attention)
    # Same masks as SDPA: calls without a layout are SDPA.
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
    config._attn_implementation = IMPLEMENTATION
    return True


def use_plain_attention(model: PreTrainedModel) -> None:
    """Undo `use_packed_attention`."""
    if has_packed_attention(model):
        config: Any = model.config.get_text_config()
        config._attn_implementation = "sdpa"


def has_packed_attention(model: PreTrainedModel) -> bool:
    config: Any = model.config.get_text_config()
    return bool(config._attn_implementation == IMPLEMENTATION)
