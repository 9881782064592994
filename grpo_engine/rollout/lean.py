"""The decoder layers of Llama and its likes, written out for steps of a few tokens.

At one token a row a small model spends more time on the library's modules than on its arithmetic: decorators, keyword
arguments and a dozen small tensors for each rotation. Here a layer is what its equations say, on the weights of the
same modules, so that an update needs nothing. Prompts and everything else still go through the modules.

`lean_layers` says which models; whether the result is theirs is for a probe to decide (rollout/open_rows.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaModel, MistralModel, PreTrainedModel, Qwen2Model, Qwen3Model
from transformers.models.mistral.modeling_mistral import MistralAttention

from grpo_engine.model.attention import AttentionCache

FAMILY = (LlamaModel, MistralModel, Qwen2Model, Qwen3Model)
"""Pre-norm layers: h += attention(norm(h)); h += down(silu(gate(norm(h))) * up(norm(h)))."""


def lean_layers(model: PreTrainedModel) -> LeanLayers | None:
    """The layers of a model of the family; None for any other, and where a module was exchanged (an adapter, a
    quantised layer)."""
    base: Any = model.base_model
    if type(base) not in FAMILY or base.config.hidden_act not in ("silu", "swish"):
        return None
    layers = [_Layer(layer) for layer in base.layers]
    linear = [module for layer in layers for module in layer.linear]
    if any(type(module) is not nn.Linear for module in linear):
        return None
    return LeanLayers(base, layers)


class LeanLayers:
    """From token ids to the hidden states that the output head reads."""

    def __init__(self, base: Any, layers: list[_Layer]) -> None:
        self._base, self._layers = base, layers

    @property
    def are_watched(self) -> bool:
        """By a hook, which only a module's own call obeys."""
        return any(module._forward_hooks or module._forward_pre_hooks for module in self._base.modules())

    def __call__(self, ids_BQ: Tensor, position_BQ: Tensor, cache: AttentionCache) -> Tensor:
        """[B, Q, hidden]; each layer's attention is the cache's."""
        hidden_BQH: Tensor = self._base.embed_tokens(ids_BQ)
        cos_BQ1D, sin_BQ1D = (part[:, :, None] for part in self._base.rotary_emb(hidden_BQH, position_BQ))
        rotation = (cos_BQ1D, *sin_BQ1D.chunk(2, dim=-1))
        for layer in self._layers:
            hidden_BQH = hidden_BQH + layer.attend(_normed(hidden_BQH, layer.first_norm), rotation, cache)
            hidden_BQH = hidden_BQH + layer.feed(_normed(hidden_BQH, layer.second_norm))
        return _normed(hidden_BQH, self._base.norm)


class _Layer:
    """One decoder layer's modules."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.attention = attention
        self.first_norm, self.second_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.query, self.key, self.value, self.out = (
            attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
        )  # fmt: skip
        self.gate, self.up, self.down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.linear = (self.query, self.key, self.value, self.out, self.gate, self.up, self.down)
        self._head_norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        holder = attention.config if isinstance(attention, MistralAttention) else attention
        self._window: int | None = getattr(holder, "sliding_window", None)

    def attend(self, normed_BQH: Tensor, rotation: tuple[Tensor, Tensor, Tensor], cache: AttentionCache) -> Tensor:
        """The attention branch, [B, Q, hidden]."""
        query, key, value = (
            torch.unflatten(_linear(normed_BQH, module), 2, (-1, self.attention.head_dim))
            for module in (self.query, self.key, self.value)
        )
        query, key = (
            heads if norm is None else _normed(heads, norm)
            for heads, norm in zip((query, key), self._head_norms, strict=True)
        )
        num_heads = query.shape[2]
        rotated = _rotated(torch.cat([query, key], dim=2), *rotation)
        query, key = rotated[:, :, :num_heads].transpose(1, 2), rotated[:, :, num_heads:].transpose(1, 2)
        output = cache.attend(self.attention, query, key, value.transpose(1, 2), self.attention.scaling, self._window)
        return _linear(output.flatten(2), self.out)

    def feed(self, normed_BQH: Tensor) -> Tensor:
        """The feed-forward branch, [B, Q, hidden]."""
        gate = functional.silu(_linear(normed_BQH, self.gate), inplace=True)
        return _linear(gate.mul_(_linear(normed_BQH, self.up)), self.down)


def _linear(tensor: Tensor, module: nn.Linear) -> Tensor:
    return functional.linear(tensor, module.weight, module.bias)


def _normed(tensor: Tensor, norm: Any) -> Tensor:
    """Root mean square normalisation over the last dimension, in float32 (Zhang & Sennrich 2019, eq. 4)."""
    return functional.rms_norm(tensor.float(), norm.weight.shape, norm.weight, norm.variance_epsilon)


def _rotated(heads: Tensor, cos: Tensor, first_sin: Tensor, second_sin: Tensor) -> Tensor:
    """Heads [B, Q, heads, D] turned by their positions: x cos + (-x2, x1) sin, x1 and x2 the halves of x (Su et al.
    2021, eq. 34, with pairs half a head apart)."""
    first, second = heads.chunk(2, dim=-1)
    rotated = heads * cos
    into_first, into_second = rotated.chunk(2, dim=-1)
    into_first.addcmul_(second.to(cos.dtype), first_sin, value=-1)
    into_second.addcmul_(first.to(cos.dtype), second_sin)
    return rotated
