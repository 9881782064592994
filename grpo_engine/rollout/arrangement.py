"""Which rows continue which prompts, how long both are, and what the layers of a step share of that."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Integers = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Step:
    """What all layers share while Q tokens are fed."""

    num_tokens: int
    held: Tensor | None = None
    """int64 [B]: own tokens held."""
    indices: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """By (parts, capacity) of a store: places of the new tokens."""
    biases: dict[int | None, Tensor | None] = field(default_factory=dict)
    """By sliding window: [B, 1, 1, Q, P + T], 0 or minus infinity; None where everything is seen."""


class Arrangement:
    """B rows of S slots, one prompt a slot.

    Prompts are padded on the right to P tokens; a row's own tokens start at 0. Rows of a slot are neighbours. Lengths
    live on the host."""

    def __init__(
        self, prompt_lengths_S: Integers, row_slot_B: Integers, lengths_B: Integers, device: torch.device
    ) -> None:
        """`row_slot_B`, ascending: the prompt that each row continues; `lengths_B`: own tokens that it holds."""
        self.lengths_B = lengths_B
        self.prompt_lengths_S = prompt_lengths_S
        self.prompt_width = int(prompt_lengths_S.max())
        """P."""
        self.row_slot_B = row_slot_B
        self.device = device
        self._step = _Step(0)
        counts_S = np.bincount(row_slot_B, minlength=len(prompt_lengths_S))
        self.prompts_S, self.first_row_S1 = map(torch.from_numpy, (prompt_lengths_S, np.append(0, counts_S.cumsum())))
        """For loops in C, on the host: `prompt_lengths_S`; the first row of each slot, then B."""
        self.repeats = int(counts_S.max())
        """R, rows of the fullest slot."""
        self._even = bool((counts_S == self.repeats).all())
        if not self._even:
            self._arrange(counts_S)

    # ---------------------------------------------------------------- sizes
    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.lengths_B)

    @property
    def num_slots(self) -> int:
        """S."""
        return len(self.prompt_lengths_S)

    @property
    def held(self) -> int:
        """Own tokens of the longest row."""
        return int(self.lengths_B.max())

    @property
    def num_tokens(self) -> int:
        """Q, new tokens a row in this step."""
        return self._step.num_tokens

    @property
    def prompt_lengths_B(self) -> Integers:
        """Tokens of each row's prompt."""
        return self.prompt_lengths_S[self.row_slot_B]

    # ---------------------------------------------------------------- steps
    def begin(self, num_tokens: int) -> None:
        """Q tokens a row come next."""
        self._step = _Step(num_tokens)

    def keep(self, counts_B: Integers) -> None:
        """Of the tokens fed last, hold so many of each row."""
        self.lengths_B = self.lengths_B + counts_B

    def held_B(self) -> Tensor:
        """int64: `lengths_B` on the device."""
        if self._step.held is None:
            self._step.held = self._tensor(self.lengths_B)
        return self._step.held

    def index(self, parts: int, capacity: int) -> Tensor:
        """Where the new tokens go in a flattened store [B, parts, capacity]."""
        if (parts, capacity) not in self._step.indices:
            column_BQ = self.lengths_B[:, None] + np.arange(self.num_tokens)
            part_BP = np.arange(self.num_rows * parts).reshape(-1, parts)
            index_BPQ = part_BP[:, :, None] * capacity + column_BQ[:, None]
            self._step.indices[parts, capacity] = self._tensor(index_BPQ.ravel())
        return self._step.indices[parts, capacity]

    def bias(self, window: int | None) -> Tensor | None:
        """[B, 1, 1, Q, P + T] for the scores over a row's prompt and own tokens; None where everything is seen."""
        if window not in self._step.biases:
            prompts, num_keys = self.prompt_lengths_B, self.prompt_width + self.held + self.num_tokens
            # A single query sees all keys when nothing is padded.
            full = self.num_tokens == 1 and int((prompts + self.lengths_B).min()) + 1 == num_keys
            within = window is None or num_keys <= window
            self._step.biases[window] = None if full and within else self._make_bias(window)
        return self._step.biases[window]

    def _make_bias(self, window: int | None) -> Tensor:
        num_tokens = self.num_tokens
        prompt_B11 = self._tensor(self.prompt_lengths_B)[:, None, None]
        own_B11 = self.held_B()[:, None, None]
        column_P = torch.arange(self.prompt_width, device=self.device)
        column_T = torch.arange(self.held + num_tokens, device=self.device)
        query_BQ1 = prompt_B11 + own_B11 + torch.arange(num_tokens, device=self.device)[:, None]
        # Positions of the keys; padding lies in the far future, which no query sees.
        key_B1L = torch.cat([torch.where(column_P < prompt_B11, column_P, 2**62), prompt_B11 + column_T], -1)
        seen_BQL = key_B1L <= query_BQ1
        if window is not None:
            seen_BQL &= query_BQ1 - key_B1L < window
        bias = torch.zeros(seen_BQL.shape, device=self.device).masked_fill_(~seen_BQL, float("-inf"))
        return bias[:, None, None]

    # ---------------------------------------------------------------- rows and slots
    def by_slot(self, tensor_B: Tensor) -> Tensor:
        """[B, …] to [S, R, …]; row 0 stands in where a slot has fewer rows."""
        tensor = tensor_B if self._even else tensor_B.index_select(0, self._row_of_place)
        return torch.unflatten(tensor, 0, (-1, self.repeats))

    def by_row(self, tensor_SR: Tensor) -> Tensor:
        """[S, R, …] to [B, …]."""
        flat = tensor_SR.flatten(0, 1)
        return flat if self._even else flat.index_select(0, self._place_of_row)

    def select(self, rows: Integers) -> tuple[Arrangement, Tensor, Tensor]:
        """These rows alone, ascending, at least one, with the slots and the rows they are of this arrangement. Prompts
        that no row continues are forgotten."""
        slots, row_slot = np.unique(self.row_slot_B[rows], return_inverse=True)
        new = Arrangement(self.prompt_lengths_S[slots], row_slot.astype(np.int64), self.lengths_B[rows], self.device)
        return new, self._tensor(slots.astype(np.int64)), self._tensor(rows)

    def joined(self, other: Arrangement) -> Arrangement:
        """The rows of both, those of the other behind."""
        return Arrangement(
            np.concatenate([self.prompt_lengths_S, other.prompt_lengths_S]),
            np.concatenate([self.row_slot_B, other.row_slot_B + self.num_slots]),
            np.concatenate([self.lengths_B, other.lengths_B]),
            self.device,
        )

    def _arrange(self, counts_S: Integers) -> None:
        """Where rows sit in [S, R]."""
        rank_B = np.arange(self.num_rows) - np.repeat(counts_S.cumsum() - counts_S, counts_S)
        places_B = self.row_slot_B * self.repeats + rank_B
        rows = np.zeros(len(counts_S) * self.repeats, dtype=np.int64)
        rows[places_B] = np.arange(self.num_rows)
        self._row_of_place, self._place_of_row = self._tensor(rows), self._tensor(places_B)

    def _tensor(self, values: Integers) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)
