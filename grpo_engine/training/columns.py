"""Rows of Python lists to flat tensors [N], their completion tokens one after another; one copy to the device each."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_engine.types import TrainRow


class Columns:
    """The tensors of some rows, in the type and on the device of `like` [N]."""

    def __init__(self, rows: Sequence[TrainRow], like: Tensor) -> None:
        """Raises ValueError unless the rows hold as many completion tokens as `like`."""
        self._rows = rows
        self._lengths = [len(row.completion_ids) for row in rows]
        self._like = like
        if sum(self._lengths) != like.shape[0]:
            raise ValueError(f"{like.shape[0]} values for {sum(self._lengths)} completion tokens in {len(rows)} rows")
        lengths_B = torch.tensor(self._lengths, dtype=torch.int64)
        self.row_N: Tensor = torch.repeat_interleave(torch.arange(len(rows)), lengths_B).to(like.device)
        """int64: index of each token's row."""

    def numbers(self, name: str) -> Tensor:
        """[N] of a list field that every row must have. Raises ValueError where it is missing or of a wrong length."""
        buffer = array("d")
        for index, row in enumerate(self._rows):
            values = getattr(row, name)
            if values is None:
                raise ValueError(f"row {index} has no {name}, which the objective needs")
            buffer.extend(self._checked(index, name, values))
        return self._tensor(buffer)

    def numbers_or(self, name: str, default_N: Tensor) -> Tensor:
        """[N] of a list field; rows without it take their tokens of `default_N`."""
        given = [getattr(row, name) is not None for row in self._rows]
        if not any(given):
            return default_N
        buffer = array("d")
        for index, (row, length) in enumerate(zip(self._rows, self._lengths, strict=True)):
            buffer.extend(self._checked(index, name, getattr(row, name)) if given[index] else [0.0] * length)
        values_N = self._tensor(buffer)
        return values_N if all(given) else torch.where(self.per_row(given).bool(), values_N, default_N)

    def flags(self, name: str) -> Tensor:
        """[N] bool of a mask field; rows without it are all True."""
        if all(getattr(row, name) is None for row in self._rows):
            return torch.ones_like(self._like, dtype=torch.bool)
        buffer = array("d")
        for index, (row, length) in enumerate(zip(self._rows, self._lengths, strict=True)):
            values = getattr(row, name)
            buffer.extend([True] * length if values is None else self._checked(index, name, values))
        return self._tensor(buffer).bool()

    def per_row(self, values: Sequence[float]) -> Tensor:
        """[N] one number a row, repeated for its tokens."""
        return self._tensor(array("d", values))[self.row_N]

    def _checked(self, index: int, name: str, values: Sequence[float]) -> Sequence[float]:
        if len(values) != self._lengths[index]:
            raise ValueError(f"row {index}: {len(values)} values of {name} for {self._lengths[index]} tokens")
        return values

    def _tensor(self, buffer: array[float]) -> Tensor:
        if not buffer:
            return self._like.new_zeros(0)
        # Not torch.tensor(list): it looks at every element twice and is several times slower.
        return torch.frombuffer(buffer, dtype=torch.float64).to(device=self._like.device, dtype=self._like.dtype)
