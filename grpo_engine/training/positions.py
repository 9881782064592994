"""Where in a completion the gradient comes from: its size by position bucket.

The report names gradients that vanish beyond 512 tokens. Two measures show whether that is so here:

- `PositionGradients`, in every run: the gradient of the loss with respect to the hidden state that predicts a token,
  RMS over the tokens of a bucket. A hook adds up what the backward pass computes anyway.
- `parameter_gradient_norms`, for studies: the part of the parameters' gradient that flows through the tokens of a
  bucket, one forward and backward pass a bucket. These parts add up to the whole gradient, sequence ratios included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from grpo_engine.model.logprobs import LogprobForward, TokenLogprobs
from grpo_engine.model.packing import TokenBatch, collate, micro_batches
from grpo_engine.training.columns import Columns
from grpo_engine.training.objectives import Objective
from grpo_engine.types import TrainRow

EDGES = (0, *(2**power for power in range(6, 21)))
"""0, 64, 128 … 2^20: bucket k holds positions [EDGES[k], EDGES[k + 1])."""


class PositionGradients:
    """Sums over one optimizer step of one rank. Positions are those in the completion, from 0."""

    def __init__(self, device: torch.device) -> None:
        self.squares_K = torch.zeros(len(EDGES), dtype=torch.float64, device=device)
        """Sum of squared gradient norms by bucket; the last one holds what lies beyond."""
        self.counts_K = torch.zeros_like(self.squares_K)
        """Trained tokens by bucket."""
        self._edges_K = torch.tensor(EDGES, device=device)

    def watch(self, features_NH: Tensor | None, batch: TokenBatch, rows: Sequence[TrainRow], scale: float) -> None:
        """Before the backward pass of a micro-batch. `scale` undoes the loss's division by the denominator, so that
        the numbers do not depend on the size of the batch."""
        if features_NH is None or not features_NH.requires_grad:
            return
        bucket_N = torch.bucketize(batch.position_in_completion_N, self._edges_K, right=True) - 1
        trained_N = Columns(rows, batch.position_in_completion_N).flags("loss_mask")
        self.counts_K.index_add_(0, bucket_N, trained_N.double())

        def add(gradient_NH: Tensor) -> None:
            wide = torch.promote_types(gradient_NH.dtype, torch.float32)
            norm_N = torch.linalg.vector_norm(gradient_NH.detach(), dim=1, dtype=wide).double() * scale
            self.squares_K.index_add_(0, bucket_N, norm_N.square())

        features_NH.register_hook(add)  # type: ignore[no-untyped-call]


def position_stats(squares: Sequence[float], counts: Sequence[float]) -> dict[str, float]:
    """gradient/position/<lo>-<hi>: RMS a trained token, of the buckets that have any."""
    highs = [str(edge) for edge in EDGES[1:]] + ["inf"]
    return {
        f"gradient/position/{low}-{high}": (square / count) ** 0.5
        for low, high, square, count in zip(EDGES, highs, squares, counts, strict=True)
        if count > 0
    }


# ---------------------------------------------------------------- study
@dataclass(frozen=True, slots=True)
class _OnlyPositions:
    """An objective whose gradient passes through tokens at positions [low, high) alone; its value is unchanged."""

    objective: Objective
    low: int
    high: float

    def loss(self, logprobs: TokenLogprobs, rows: Sequence[TrainRow]) -> Tensor:
        position_N = torch.cat([torch.arange(len(row.completion_ids)) for row in rows]).to(logprobs.policy.device)
        inside_N = (position_N >= self.low) & (position_N < self.high)
        cut = {
            field.name: torch.where(inside_N, value, value.detach())
            for field in fields(logprobs)
            if field.name != "features" and (value := getattr(logprobs, field.name)).is_floating_point()
        }
        return self.objective(replace(logprobs, **cut), rows).loss


def parameter_gradient_norms(
    forward: LogprobForward,
    objective: Objective,
    rows: Sequence[TrainRow],
    denominator: float,
    *,
    max_tokens: int,
    edges: Sequence[int] = EDGES,
) -> dict[str, float]:
    """`<lo>-<hi>` -> L2 norm of the gradient that reaches the model's parameters through the tokens of that bucket.

    Buckets without tokens are left out. Gradients of the model must be clear before and are cleared after."""
    longest = max(len(row.completion_ids) for row in rows)
    norms = {}
    for low, high in zip(edges, [*edges[1:], float("inf")], strict=True):
        if low >= longest:
            break
        part = _OnlyPositions(objective, low, high)
        for indices in micro_batches(rows, max_tokens, packed=forward.packed):
            some = [rows[index] for index in indices]
            batch = collate(some, device=forward.device, packed=forward.packed)
            logprobs = forward(batch, objective.temperature, entropy_gradient=objective.entropy_gradient)
            (part.loss(logprobs, some) / denominator).backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in forward.model.parameters() if p.grad is not None]
        norms[f"{low}-{high}"] = float(torch.nn.utils.get_total_norm(gradients))
        forward.model.zero_grad(set_to_none=True)
    return norms
