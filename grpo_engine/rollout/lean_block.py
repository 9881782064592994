"""A block of the multi-token prediction heads, written out for drafting on its own weights, as lean.py does for the
policy's layers: model/mtp.py has the equations, and what lies between its products and its attention is C here."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from grpo_engine.model.mtp import EPSILON, MTPBlock
from grpo_engine.rollout.native.layer import InC


class LeanBlock:
    """The methods of MTPBlock, the C ones where states and weights allow."""

    def __init__(self, block: MTPBlock) -> None:
        self.block = block
        self._is_float32 = all(weight.dtype == torch.float32 for weight in block.parameters())

    def before_attention(
        self, hidden: Tensor, embedded: Tensor, rotation: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As MTPBlock; [B, Q, …]."""
        steps, block = self._steps(hidden, embedded), self.block
        if steps is None:
            return block.before_attention(hidden, embedded, rotation)
        joined = torch.cat(
            [_normed(steps, hidden, block.hidden_norm.weight), _normed(steps, embedded, block.embedding_norm.weight)],
            -1,
        )
        stream = functional.linear(joined, block.combine.weight)
        qkv = functional.linear(_normed(steps, stream, block.attention_norm.weight), block.qkv.weight)
        heads, pairs = block.shape.num_heads, block.shape.num_key_value_heads
        states = torch.unflatten(qkv, -1, (-1, block.shape.head_size))
        queries, keys, values = torch.split(states, [heads, pairs, pairs], dim=-2)
        # One angle a pair there, one a number here.
        cosines, sines = (torch.cat([part, part], -1).flatten(-2) for part in rotation)
        return stream, *steps.rotated(queries.contiguous(), keys.contiguous(), cosines, sines), values

    def after_attention(self, stream: Tensor, attended: Tensor) -> Tensor:
        """As MTPBlock."""
        steps, block = self._steps(stream, attended), self.block
        if steps is None:
            return block.after_attention(stream, attended)
        branch = functional.linear(attended.flatten(-2), block.attention_output.weight)
        stream, normed = steps.added_and_normed(stream, branch, block.feed_forward_norm.weight, EPSILON)
        gate, up = functional.linear(normed, block.gate_up.weight).chunk(2, dim=-1)
        return stream + functional.linear(steps.gated(gate.contiguous(), up.contiguous()), block.down.weight)

    def features(self, hidden: Tensor) -> Tensor:
        """As MTPBlock."""
        steps = self._steps(hidden)
        return self.block.features(hidden) if steps is None else _normed(steps, hidden, self.block.output_norm.weight)

    def _steps(self, *states: Tensor) -> InC | None:
        if not self._is_float32 or any(state.dtype != torch.float32 for state in states):
            return None
        return InC.for_states(states[0])


def _normed(steps: InC, states: Tensor, weight: Tensor) -> Tensor:
    return steps.added_and_normed(states.contiguous(), None, weight, EPSILON)[1]
