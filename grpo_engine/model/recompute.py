"""Gradient checkpointing: parts of a model are computed again in the backward pass instead of kept.

Transformers' own works in training mode only, where dropout is on too; ours works in evaluation mode, which the learner
needs. A part gets a subclass of its class, so that a deep copy of the model recomputes with its own weights (a wrapped
bound method would call the original's).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_engine.errors import InvalidConfig, Problem

Mode = Literal["none", "full", "attention", "feed_forward"]
NAMES: dict[str, tuple[str, ...]] = {
    "attention": ("attention", "attn"),
    "feed_forward": ("mlp", "feedforward", "ffn", "moe", "experts"),
}
"""What the classes of a layer's parts are called, in lower case."""


class _Recomputed(nn.Module):
    """Forward without keeping activations. Without gradient it is the plain forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        return checkpoint(super().forward, *args, use_reentrant=False, preserve_rng_state=self.training, **kwargs)


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def enable_gradient_checkpointing(model: PreTrainedModel, mode: Mode) -> None:
    """Recompute whole decoder layers (full), or their attention or feed-forward part; none undoes it.

    Raises InvalidConfig naming `memory.gradient_checkpointing` when the model has no such parts."""
    for module in model.modules():
        if isinstance(module, _Recomputed):
            module.__class__ = type(module).__mro__[2]
    if mode == "none":
        return
    parts = list(_parts(model, mode))
    if not parts:
        message = f"{type(model).__name__} has no part of this kind that could be computed again"
        raise InvalidConfig([Problem("memory.gradient_checkpointing", mode, message, "use none")])
    for part in parts:
        kind = type(part)
        if kind not in _CLASSES:
            _CLASSES[kind] = type(kind.__name__, (_Recomputed, kind), {"__module__": kind.__module__})
        part.__class__ = _CLASSES[kind]


def _parts(model: PreTrainedModel, mode: Mode) -> Iterator[nn.Module]:
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            if mode == "full":
                yield layer
            else:
                yield from (part for part in layer.children() if _is_called(part, NAMES[mode]))


def _is_called(part: nn.Module, names: tuple[str, ...]) -> bool:
    kind = type(part).__name__.lower()
    return any(name in kind for name in names)
