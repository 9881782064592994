"""A layer's small steps in C (layer.c), called on tensors. They write where they can into what they are given."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from grpo_engine.rollout.native.compiled import library


class InC:
    """Implements lean.SmallSteps for contiguous float32 on the CPU. Raises TypeError for anything else."""

    def __init__(self, native: ctypes.CDLL) -> None:
        self._native = native

    @staticmethod
    def for_states(hidden: Tensor) -> InC | None:
        """None where hidden states, or what products make of them, are anything else, or no C compiler is there."""
        plain = hidden.device.type == "cpu" and hidden.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        native = library() if plain else None
        return None if native is None else InC(native)

    def added_and_normed(
        self, hidden: Tensor, branch: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """As lean.SmallSteps; the sum takes the branch's place."""
        total = hidden if branch is None else branch
        _check(hidden, total, weight)
        normed = torch.empty_like(total)
        self._native.add_and_norm(
            total.data_ptr(), None if branch is None else hidden.data_ptr(), weight.data_ptr(), normed.data_ptr(),
            total.numel() // total.shape[-1], total.shape[-1], epsilon,
        )  # fmt: skip
        return total, normed

    def rotated(self, query_BQhD: Tensor, key_BQHD: Tensor, cos_BQD: Tensor, sin_BQD: Tensor) -> tuple[Tensor, Tensor]:
        """As lean.SmallSteps, in place. Raises ValueError where only a part of a head is turned."""
        if cos_BQD.shape[-1] != query_BQhD.shape[-1]:
            raise ValueError(f"heads of width {query_BQhD.shape[-1]} are turned by {cos_BQD.shape[-1]} cosines")
        _check(query_BQhD, key_BQHD, cos_BQD, sin_BQD)
        for heads in (query_BQhD, key_BQHD):
            count, width = heads.shape[2:]
            rows = heads.shape[0] * heads.shape[1]
            self._native.rotate(heads.data_ptr(), cos_BQD.data_ptr(), sin_BQD.data_ptr(), rows, count, width)
        return query_BQhD, key_BQHD

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """As lean.SmallSteps, in place of the gate."""
        _check(gate, up)
        self._native.gate(gate.data_ptr(), up.data_ptr(), gate.numel())
        return gate


def _check(*tensors: Tensor) -> None:
    """The loops trust what they are given: other types or strides would make them read and write elsewhere."""
    for tensor in tensors:
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise TypeError(f"steps in C take contiguous float32, not {tensor.dtype} with strides {tensor.stride()}")
