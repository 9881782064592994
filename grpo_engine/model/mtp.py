"""Multi-token prediction heads: small blocks in sequence that guess the tokens after the next one.

DeepSeek-V3, arXiv:2412.19437, section 2.2, eq. 21-25. With h_i^0 the policy's hidden state that predicts completion
token x_i (slot i; slot 0 sits on the last prompt token), block k = 1 … depth computes

    u_i^k = M_k [RMSNorm(h_i^{k-1}) ; RMSNorm(Emb(x_{i+k-1}))]
    h_i^k = Block_k(u_0^k … u_i^k)                              causal attention, gated feed-forward
    P(x_{i+k} | …) = softmax(Head(RMSNorm(h_i^k)) / temperature)

Emb and Head are the policy's. Nothing here changes the policy: the heads are no part of its module, and whoever trains
them detaches what they read. A block attends over the slots of the completion alone, so prompts cost it nothing; what
the prompt says reaches it through the hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from grpo_engine.model.attention import PackedLayout, build_buckets, layout_to, packed_attention

EPSILON = 1e-6
ROTARY_BASE = 10_000.0
PROBE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class MTPShape:
    """Widths of a block, those of the policy's own layers."""

    hidden: int
    embedding: int
    num_heads: int
    num_key_value_heads: int
    head_size: int
    feed_forward: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> MTPShape:
        """Raises ValueError when the model has no output head that reads hidden states."""
        output, embedding = _head(model), _embedding(model)
        if output is None or embedding is None:
            raise ValueError(f"{type(model).__name__} has no output head or token embedding for MTP heads to share")
        config: Any = model.config.get_text_config()
        hidden = int(output.weight.shape[1])
        num_heads = int(config.num_attention_heads)
        head_size = int(getattr(config, "head_dim", None) or max(2, hidden // num_heads))
        return cls(
            hidden=hidden,
            embedding=int(embedding.weight.shape[1]),
            num_heads=num_heads,
            num_key_value_heads=int(getattr(config, "num_key_value_heads", None) or num_heads),
            head_size=head_size + head_size % 2,  # rotations turn pairs
            feed_forward=int(getattr(config, "intermediate_size", None) or 4 * hidden),
        )


# ---------------------------------------------------------------- where the tokens are
@dataclass(frozen=True, slots=True)
class CompletionSlots:
    """The N completion tokens of some rows, one row after another; slot n is where token n is predicted."""

    packed: PackedLayout
    position_N: Tensor
    """int64, of each token in its completion, from 0."""
    last_N: Tensor
    """int64, the last token of each token's row."""
    starts: list[int]
    lengths: list[int]
    """Of the rows that have tokens."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> CompletionSlots:
        """`lengths`: completion tokens of each row; N > 0 in all."""
        length_B = np.array([length for length in lengths if length], dtype=np.int64)
        start_B = length_B.cumsum() - length_B
        none_B = np.zeros_like(start_B)
        buckets = build_buckets(none_B, none_B, start_B, length_B, int(length_B.sum()))
        last_N = np.repeat(start_B + length_B - 1, length_B)
        return cls(
            layout_to(buckets, device),
            torch.from_numpy(buckets.position_N).to(device),
            torch.from_numpy(last_N).to(device),
            start_B.tolist(),
            length_B.tolist(),
        )

    def scored(self, depth: int) -> Tensor:
        """int64: slots whose completion goes on for `depth` more tokens; slot n predicts token n + depth there."""
        parts = [
            np.arange(start, start + length - depth)
            for start, length in zip(self.starts, self.lengths, strict=True)
            if length > depth
        ]
        slots = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        return torch.from_numpy(slots).to(self.last_N.device)


# ---------------------------------------------------------------- one block
class MTPBlock(nn.Module):
    """One depth: joins a hidden state with a token, attends, and gives the hidden state of the next depth.

    Attention itself is the caller's, between `before_attention` and `after_attention`: training has whole completions,
    drafting a cache."""

    def __init__(self, shape: MTPShape) -> None:
        super().__init__()
        hidden, queries = shape.hidden, shape.num_heads * shape.head_size
        self.shape = shape
        self.hidden_norm = nn.RMSNorm(hidden, EPSILON)
        self.embedding_norm = nn.RMSNorm(shape.embedding, EPSILON)
        self.combine = nn.Linear(hidden + shape.embedding, hidden, bias=False)
        self.attention_norm = nn.RMSNorm(hidden, EPSILON)
        self.qkv = nn.Linear(hidden, queries + 2 * shape.num_key_value_heads * shape.head_size, bias=False)
        self.attention_output = nn.Linear(queries, hidden, bias=False)
        self.feed_forward_norm = nn.RMSNorm(hidden, EPSILON)
        self.gate_up = nn.Linear(hidden, 2 * shape.feed_forward, bias=False)
        self.down = nn.Linear(shape.feed_forward, hidden, bias=False)
        self.output_norm = nn.RMSNorm(hidden, EPSILON)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)

    def before_attention(
        self, hidden: Tensor, embedded: Tensor, rotation: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """hidden [..., H] and embedded [..., E] to the stream [..., H], queries [..., heads, D], and keys and values
        [..., key-value heads, D], queries and keys rotated."""
        joined = torch.cat([_normed(self.hidden_norm, hidden), _normed(self.embedding_norm, embedded)], dim=-1)
        stream = self.combine(joined)
        qkv = self.qkv(_normed(self.attention_norm, stream)).unflatten(-1, (-1, self.shape.head_size))
        heads, pairs = self.shape.num_heads, self.shape.num_key_value_heads
        turned, values = torch.split(qkv, [heads + pairs, pairs], dim=-2)
        queries, keys = torch.split(_rotated(turned, rotation), [heads, pairs], dim=-2)
        return stream, queries, keys, values

    def after_attention(self, stream: Tensor, attended: Tensor) -> Tensor:
        """stream [..., H] and what attention gave [..., heads, D] to the block's hidden state [..., H]."""
        stream = stream + self.attention_output(attended.flatten(-2))
        gate, up = self.gate_up(_normed(self.feed_forward_norm, stream)).chunk(2, dim=-1)
        hidden: Tensor = stream + self.down(functional.silu(gate) * up)
        return hidden

    def features(self, hidden: Tensor) -> Tensor:
        """What the policy's output head reads, [..., H]."""
        return _normed(self.output_norm, hidden)


class MTPHeads(nn.Module):
    """`depth` blocks beside a policy, in at least float32, on its device. Weights come from `seed`."""

    frequency_F: Tensor

    def __init__(self, model: PreTrainedModel, depth: int, seed: int) -> None:
        """Raises ValueError when depth is below 1 or the model shares nothing that heads could use."""
        super().__init__()
        if depth < 1:
            raise ValueError(f"depth {depth} must be at least 1")
        shape, head = MTPShape.of(model), _head(model)
        with torch.random.fork_rng(devices=[]):
            # Drawn on the CPU, so that every rank and device starts from the same weights.
            torch.default_generator.manual_seed(seed)
            self.blocks = nn.ModuleList(MTPBlock(shape) for _ in range(depth))
        powers_F = torch.arange(0, shape.head_size, 2, dtype=torch.float64) / shape.head_size
        self.register_buffer("frequency_F", ROTARY_BASE**-powers_F, persistent=False)
        self.to(device=head.weight.device, dtype=torch.promote_types(head.weight.dtype, torch.float32))
        size_H = hidden_sizes(model)
        for block in self.each():
            block.output_norm.weight.data.copy_(size_H)

    @property
    def depth(self) -> int:
        return len(self.blocks)

    def each(self) -> list[MTPBlock]:
        return [block for block in self.blocks if isinstance(block, MTPBlock)]

    def rotation(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine for keys and queries at `position` [...]: [..., 1, D / 2] each."""
        angle = (position[..., None] * self.frequency_F)[..., None, :]
        return angle.cos(), angle.sin()

    def forward(self, hidden_NH: Tensor, embedded_NE: Tensor, slots: CompletionSlots) -> list[Tensor]:
        """[N, H] features for the output head, one tensor a depth: at slot n of depth k those of token n + k.

        hidden_NH[n] predicts token n, whose embedding is embedded_NE[n]. Slots that `slots.scored(k)` leaves out hold
        numbers without meaning, which no other slot sees."""
        rotation = self.rotation(slots.position_N)
        order_N = torch.arange(len(hidden_NH), device=hidden_NH.device)
        features = []
        for depth, block in enumerate(self.each()):
            token_N = torch.minimum(order_N + depth, slots.last_N)
            stream_NH, *heads = block.before_attention(hidden_NH, embedded_NE[token_N], rotation)
            q, k, v = (tensor.transpose(0, 1)[None] for tensor in heads)
            attended, _ = packed_attention(block, q, k, v, None, is_causal=True, packed_layout=slots.packed)
            hidden_NH = block.after_attention(stream_NH, attended[0])
            features.append(block.features(hidden_NH))
        return features


# ---------------------------------------------------------------- what heads share with the policy
def shared_head(model: PreTrainedModel) -> nn.Linear:
    """The policy's output head without gradient: the very weights, read anew at each call."""
    output = _head(model)
    head = nn.Linear(1, 1, bias=False, device="meta")
    head.weight = nn.Parameter(output.weight.detach(), requires_grad=False)
    bias = getattr(output, "bias", None)
    head.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))
    return head


def head_logits(model: PreTrainedModel, features: Tensor) -> Tensor:
    """features [..., H] to logits [..., V] by the policy's output head."""
    output = _head(model)
    return functional.linear(features.to(output.weight.dtype), output.weight, getattr(output, "bias", None))


@torch.no_grad()
def embedded(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Token ids [...] to the policy's embeddings [..., E], without gradient."""
    vectors: Tensor = _embedding(model)(tokens)
    return vectors


@torch.no_grad()
def hidden_sizes(model: PreTrainedModel) -> Tensor:
    """[H] root mean square of each component of the policy's hidden states on a few tokens.

    The output head expects numbers of this size; heads that began at another would spend their first thousand steps on
    growing there."""
    weight, base = _head(model).weight, model.base_model
    if base is model:
        return torch.ones(weight.shape[1])
    was_training = model.training
    model.train(False)
    try:
        ids = torch.arange(PROBE_TOKENS, device=weight.device)[None] % weight.shape[0]
        hidden = base(input_ids=ids, use_cache=False).last_hidden_state
    finally:
        model.train(was_training)
    size_H: Tensor = hidden[0].square().mean(0).sqrt()
    return size_H


def _head(model: Any) -> Any:
    return model.get_output_embeddings()


def _embedding(model: Any) -> Any:
    return model.get_input_embeddings()


def _normed(norm: nn.RMSNorm, values: Tensor) -> Tensor:
    """In the norm's own type: under autocast the values may be narrower."""
    return norm(values.to(norm.weight.dtype))  # type: ignore[no-any-return]


def _rotated(vectors: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """[..., heads, D], pairs (d, d + D / 2) turned by the position's angles; same type."""
    cosine, sine = rotation
    one, two = vectors.chunk(2, dim=-1)
    return torch.cat([one * cosine - two * sine, two * cosine + one * sine], dim=-1).to(vectors.dtype)
