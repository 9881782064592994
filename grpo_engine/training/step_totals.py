"""What one optimizer step adds up on its way, and how it becomes StepResult's stats over all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_engine.protocols import Communicator
from grpo_engine.training.objectives import Sums, explained_variance
from grpo_engine.training.positions import EDGES, PositionGradients, position_stats
from grpo_engine.types import TrainRow

MOMENTS = ("value/return_mean", "value/return_square", "value/error_mean", "value/error_square")
"""Steps towards the explained variance; nobody wants to see them."""


@dataclass(frozen=True, slots=True)
class StepValues:
    """One step over all ranks, on the host."""

    loss: float
    """The step's loss itself: weighted sum divided by the denominator. NaN or infinite when any rank's was."""
    num_tokens: int
    means: dict[str, float]
    """Over trained tokens."""
    parts: dict[str, float]
    """What the loss is the sum of."""
    maxima: dict[str, float]
    positions: dict[str, float]
    norms: list[float]
    """The `norms` that were given to `over_ranks`."""


@dataclass(frozen=True, slots=True)
class Names:
    """What a rank has numbers of; ranks that saw other rows, or none, have others."""

    sums: tuple[str, ...]
    parts: tuple[str, ...]
    maxima: tuple[str, ...]

    @staticmethod
    def union(names: Sequence[Names]) -> Names:
        """In the same order on every rank."""
        return Names(
            tuple(dict.fromkeys(name for each in names for name in each.sums)),
            tuple(dict.fromkeys(name for each in names for name in each.parts)),
            tuple(dict.fromkeys(name for each in names for name in each.maxima)),
        )


class StepTotals:
    """Sums of one rank; every tensor stays on the device until the step ends."""

    def __init__(self, device: torch.device) -> None:
        self.positions = PositionGradients(device)
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._num_tokens = 0
        self._sums: dict[str, Tensor] = {}
        self._parts: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    @property
    def names(self) -> Names:
        return Names(tuple(self._sums), tuple(self._parts), tuple(self._maxima))

    def count(self, rows: Sequence[TrainRow]) -> None:
        """Once a row, however many parts judge it."""
        self._num_tokens += sum(row.num_trained_tokens for row in rows)

    def add(self, sums: Sums, denominator: float) -> None:
        """`denominator`: what the loss was divided by."""
        self._loss = self._loss + sums.loss.detach().double() / denominator
        for name, value in sums.stats.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        for name, value in sums.parts.items():
            share = value / denominator
            self._parts[name] = self._parts[name] + share if name in self._parts else share
        for name, value in sums.maxima.items():
            self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def over_ranks(self, communicator: Communicator, names: Names, norms: Sequence[Tensor] = ()) -> StepValues:
        """Collective: one sum and one maximum of a small float64 tensor each, then one copy to the host.

        `names`: the union of all ranks'. `norms`: scalars that are equal on every rank already."""
        zero, lowest = self._loss.new_zeros(()), self._loss.new_full((), -math.inf)
        scalars = [self._loss, self._loss.new_full((), self._num_tokens)]
        scalars += [self._sums.get(name, zero) for name in names.sums]
        scalars += [self._parts.get(name, zero) for name in names.parts]
        summed = torch.cat([torch.stack(scalars), self.positions.squares_K, self.positions.counts_K])
        largest = torch.stack([lowest, *(self._maxima.get(name, lowest) for name in names.maxima)])
        communicator.sum_([summed])
        communicator.max_(largest)
        return _on_host(torch.cat([summed, largest, *(norm.reshape(1) for norm in norms)]).tolist(), names)


def _on_host(numbers: list[float], names: Names) -> StepValues:
    """`numbers` in the order in which `over_ranks` puts them."""
    values = iter(numbers)
    loss, num_tokens = next(values), int(next(values))
    means = {name: next(values) / max(1, num_tokens) for name in names.sums}
    parts = {name: next(values) for name in names.parts}
    squares, counts = [next(values) for _ in EDGES], [next(values) for _ in EDGES]
    next(values)  # keeps the tensor of maxima from being empty
    maxima = {name: next(values) for name in names.maxima}
    return StepValues(loss, num_tokens, means, parts, maxima, position_stats(squares, counts), list(values))


def step_stats(values: StepValues) -> dict[str, float]:
    """By their names in the metric catalogue; empty when nothing was trained on."""
    if values.num_tokens == 0:
        return {}
    stats = {"loss": values.loss} | values.means | values.parts | values.maxima | values.positions
    if "value/error_square" in values.means:
        explained = explained_variance(values.means)
        stats = {name: value for name, value in stats.items() if name not in MOMENTS}
        if explained is not None:
            stats["value/explained_variance"] = explained
    return stats


def memory_stats(device: torch.device, token_limit: int) -> dict[str, float]:
    """The token limit of a pass; on CUDA also the peak of what tensors held since the step's first pass, the peak of
    what the allocator held, and the share of that which no tensor had."""
    stats = {"memory/micro_batch_tokens": float(token_limit)}
    if device.type != "cuda":
        return stats
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return stats | {
        "memory/allocated_bytes": float(allocated),
        "memory/reserved_bytes": float(reserved),
        "memory/fragmentation_share": max(0.0, 1 - allocated / max(1, reserved)),
    }


def forget_peak(device: torch.device) -> None:
    """Peaks of `memory_stats` count from here; nothing happens without CUDA."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
