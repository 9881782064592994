"""The decoder layers of Llama and its likes, written out for steps of a few tokens.

At one token a row a small model spends more time on the library's modules than on its arithmetic: decorators, keyword
arguments and a dozen small tensors for each rotation. Here a layer is what its equations say, on the weights of the
same modules, so that an update needs nothing. Prompts and everything else still go through the modules.

`lean_layers` says which models; whether the result is theirs is for a probe to decide (rollout/open_rows.py).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaModel, MistralModel, PreTrainedModel, Qwen2Model, Qwen3Model
from transformers.models.mistral.modeling_mistral import MistralAttention

from grpo_engine.model.attention import AttentionCache
from grpo_engine.rollout.native.layer import InC

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
        self._is_float32 = all(weight.dtype == torch.float32 for weight in base.parameters())

    @property
    def are_watched(self) -> bool:
        """By a hook, which only a module's own call obeys."""
        return any(module._forward_hooks or module._forward_pre_hooks for module in self._base.modules())

    def __call__(self, ids_BQ: Tensor, position_BQ: Tensor, cache: AttentionCache) -> Tensor:
        """[B, Q, hidden]; each layer's attention is the cache's."""
        hidden_BQH: Tensor = self._base.embed_tokens(ids_BQ)
        cos_BQD, sin_BQD = self._base.rotary_emb(hidden_BQH, position_BQ)
        steps: SmallSteps = (InC.for_states(hidden_BQH) if self._is_float32 else None) or ByTorch()
        branch_BQH: Tensor | None = None
        for layer in self._layers:
            hidden_BQH, normed_BQH = _joined(steps, hidden_BQH, branch_BQH, layer.first_norm)
            branch_BQH = layer.attend(normed_BQH, (cos_BQD, sin_BQD), cache, steps)
            hidden_BQH, normed_BQH = _joined(steps, hidden_BQH, branch_BQH, layer.second_norm)
            branch_BQH = layer.feed(normed_BQH, steps)
        return _joined(steps, hidden_BQH, branch_BQH, self._base.norm)[1]


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

    def attend(
        self, normed_BQH: Tensor, rotation: tuple[Tensor, Tensor], cache: AttentionCache, steps: SmallSteps
    ) -> Tensor:
        """The attention branch, [B, Q, hidden]."""
        query, key, value = (
            torch.unflatten(_linear(normed_BQH, module), 2, (-1, self.attention.head_dim))
            for module in (self.query, self.key, self.value)
        )
        query, key = (
            heads if norm is None else _joined(steps, heads, None, norm)[1]
            for heads, norm in zip((query, key), self._head_norms, strict=True)
        )
        query, key = steps.rotated(query, key, *rotation)
        states = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        output = cache.attend(self.attention, *states, self.attention.scaling, self._window)
        return _linear(output.flatten(2), self.out)

    def feed(self, normed_BQH: Tensor, steps: SmallSteps) -> Tensor:
        """The feed-forward branch, [B, Q, hidden]."""
        gated = steps.gated(_linear(normed_BQH, self.gate), _linear(normed_BQH, self.up))
        return _linear(gated, self.down)


# ---------------------------------------------------------------- between products and attention
class SmallSteps(Protocol):
    """Tensors that are given may be written over."""

    def added_and_normed(
        self, hidden: Tensor, branch: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """(their sum, its root mean square normalisation over the last dimension, in float32; Zhang & Sennrich 2019,
        eq. 4)."""
        ...

    def rotated(self, query_BQhD: Tensor, key_BQHD: Tensor, cos_BQD: Tensor, sin_BQD: Tensor) -> tuple[Tensor, Tensor]:
        """Heads turned by their positions: x cos + (-x2, x1) sin, x1 and x2 the halves of x (Su et al. 2021, eq. 34,
        with pairs half a head apart)."""
        ...

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) times up."""
        ...


class ByTorch:
    """Implements SmallSteps in any type and on any device."""

    def added_and_normed(
        self, hidden: Tensor, branch: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        total = hidden if branch is None else hidden + branch
        return total, functional.rms_norm(total.float(), weight.shape, weight, epsilon)

    def rotated(self, query_BQhD: Tensor, key_BQHD: Tensor, cos_BQD: Tensor, sin_BQD: Tensor) -> tuple[Tensor, Tensor]:
        heads, cos, (first_sin, second_sin) = (
            torch.cat([query_BQhD, key_BQHD], dim=2), cos_BQD[:, :, None], sin_BQD[:, :, None].chunk(2, dim=-1)
        )  # fmt: skip
        first, second = heads.chunk(2, dim=-1)
        rotated = heads * cos
        into_first, into_second = rotated.chunk(2, dim=-1)
        into_first.addcmul_(second.to(cos.dtype), first_sin, value=-1)
        into_second.addcmul_(first.to(cos.dtype), second_sin)
        query, key = torch.split(rotated, [query_BQhD.shape[2], key_BQHD.shape[2]], dim=2)
        return query, key

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return functional.silu(gate, inplace=True).mul_(up)


def _joined(steps: SmallSteps, hidden: Tensor, branch: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
    return steps.added_and_normed(hidden, branch, norm.weight, norm.variance_epsilon)


def _linear(tensor: Tensor, module: nn.Linear) -> Tensor:
    return functional.linear(tensor, module.weight, module.bias)
