"""The rows being decoded: their cached keys and values, and the forward pass that continues them.

A prompt is prefilled once, without padding, and shared by the rows that continue it (rollout/attention.py). Rows of
any length lie side by side: each has positions of its own, nothing is padded on the left. Models that cannot compute
this way exactly get `PaddedRows` with the same methods (rollout/padded_rows.py); `open_rows` decides by a probe.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from grpo_engine.model.attention import CACHE_ARGUMENT, LAYOUT_ARGUMENT, PackedLayout, packed_attention
from grpo_engine.model.packing import collate
from grpo_engine.rollout.attention import Block, block_of_prompts, joined_blocks
from grpo_engine.rollout.forward import Forward, Outputs
from grpo_engine.types import TrainRow

MAX_BLOCKS = 4
"""Admissions kept apart; more cost more calls than they save padding."""
PREFILL_TOKENS = 16384
"""Prompt tokens in one forward pass; a longer prompt goes alone."""
RAGGED = 1.5
"""Prompts whose padded tokens exceed the real ones so many times are kept apart."""

Integers = npt.NDArray[np.int64]


class Rows(Protocol):
    """B rows, each with tokens in the cache and, by the decoding loop, one pending token that was chosen and not fed.

        admit ──► first token ──► feed([pending, drafts …]) ──► keep(1 + accepted) ──► feed …
                                          select drops rows

    Lengths live on the host: `keep` waits for its counts where they are on an accelerator.
    """

    @property
    def num_rows(self) -> int:
        """B."""
        ...

    def admit(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> Outputs:
        """Prefill each prompt once and add `counts[i]` > 0 rows of prompt i at the end, one prompt after another.

        Outputs of the new rows alone, Q = 1: what follows the prompt."""
        ...

    def feed(self, tokens_BQ: Tensor) -> Outputs:
        """Compute Q tokens of every row after those it holds; they are held only as far as `keep` then says."""
        ...

    def keep(self, count_B: Tensor) -> None:
        """Hold the first count_B[b] (int64, 0 … Q) of the tokens fed last. 0 leaves a row as it was, which is how
        finished rows wait for `select`."""
        ...

    def select(self, rows: Tensor) -> None:
        """Go on with these rows only (int64, ascending, on the host)."""
        ...


# ---------------------------------------------------------------- shared prompts
class SharedRows:
    """Implements Rows on models whose attention is ours to replace."""

    def __init__(self, forward: Forward, *, room_tokens: int = 64) -> None:
        """The model is one that passed `open_rows.shared_rows_are_exact`, which also sets our attention on it.
        `room_tokens`: tokens a row that matrix products reserve at first."""
        self._forward = forward
        self._room_tokens = room_tokens
        self._blocks: list[Block] = []

    @property
    def num_rows(self) -> int:
        return sum(block.rows.num_rows for block in self._blocks)

    def admit(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> Outputs:
        outputs = []
        for start, end in _portions([len(prompt) for prompt in prompts]):
            output, block = self._prefill(prompts[start:end], counts[start:end])
            self._blocks.append(block)
            outputs.append(output)
        while len(self._blocks) > MAX_BLOCKS:
            self._merge()
        return Outputs.joined(outputs)

    def feed(self, tokens_BQ: Tensor) -> Outputs:
        num_tokens = tokens_BQ.shape[1]
        for block in self._blocks:
            block.begin(num_tokens)
        start_B = np.concatenate([block.rows.prompt_lengths_B + block.rows.lengths_B for block in self._blocks])
        # A finished row that still waits for `select`, or a draft too long, must not run past the model's positions.
        position_BQ = (start_B[:, None] + np.arange(num_tokens)).clip(max=self._forward.max_context_tokens - 1)
        return self._forward.step(tokens_BQ, self._forward.tensor(position_BQ), self)

    def keep(self, count_B: Tensor) -> None:
        counts = np.asarray(count_B.tolist(), dtype=np.int64)
        for block, start, end in self._ranges():
            block.rows.keep(counts[start:end])

    def select(self, rows: Tensor) -> None:
        kept = np.asarray(rows.tolist(), dtype=np.int64)
        if (np.diff(kept) <= 0).any():
            raise ValueError("rows must be selected in ascending order")
        parts = [(block, kept[(kept >= start) & (kept < end)] - start) for block, start, end in self._ranges()]
        self._blocks = [block.select(part) for block, part in parts if len(part)]

    def attend(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float | None,
        window: int | None,
    ) -> Tensor:  # fmt: skip
        """Called by every layer during `feed` (model/attention.py): [B, heads, Q, width] to [B, Q, heads, width]."""
        layer: int = module.layer_idx  # type: ignore[assignment]
        outputs = [
            block.attend(layer, query[start:end], key[start:end], value[start:end], scaling, window)
            for block, start, end in self._ranges()
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _ranges(self) -> Iterator[tuple[Block, int, int]]:
        start = 0
        for block in self._blocks:
            yield block, start, start + block.rows.num_rows
            start += block.rows.num_rows

    def _prefill(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> tuple[Outputs, Block]:
        device = self._forward.device
        # A completion token each, which is not fed: its prediction is what the prompt's last token gives.
        batch = collate([TrainRow(list(prompt), [0]) for prompt in prompts], device=device, packed=True)
        assert batch.layout is not None
        states = _PromptStates(batch.layout)
        output = self._forward(batch.input_ids, batch.position_ids, {CACHE_ARGUMENT: states}, batch.feature_index)
        block = block_of_prompts(states.layers, *_places(prompts), counts, self._room_tokens)
        return output.select(self._forward.tensor(block.rows.row_slot_B)), block

    def _merge(self) -> None:
        """Join the two neighbours that lose least by padding."""
        losses = []
        for a, b in pairwise(block.rows for block in self._blocks):
            width = max(a.prompt_width, b.prompt_width) + max(a.held, b.held)
            losses.append(sum(x.num_rows * (width - x.prompt_width - x.held) for x in (a, b)))
        at = int(np.argmin(losses))
        self._blocks[at : at + 2] = [joined_blocks(self._blocks[at], self._blocks[at + 1])]


class _PromptStates:
    """Keys and values of packed prompts, as the layers compute them."""

    def __init__(self, layout: PackedLayout) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._layout = layout

    def attend(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float | None,
        window: int | None,
    ) -> Tensor:  # fmt: skip
        """[1, heads, N, width] to [1, N, heads, width]."""
        layer: int = module.layer_idx  # type: ignore[assignment]
        self.layers[layer] = (key[0], value[0])
        arguments: dict[str, Any] = {"scaling": scaling, "sliding_window": window, LAYOUT_ARGUMENT: self._layout}
        output, _ = packed_attention(module, query, key, value, None, **arguments)
        return output


def _places(prompts: Sequence[Sequence[int]]) -> tuple[Integers, Integers]:
    """Where each prompt begins in the packed sequence, which holds equal ones once, and how long it is."""
    begins: dict[tuple[int, ...], int] = {}
    num_tokens, starts = 0, []
    for prompt in map(tuple, prompts):
        if prompt not in begins:
            begins[prompt] = num_tokens
            num_tokens += len(prompt)
        starts.append(begins[prompt])
    return np.array(starts, dtype=np.int64), np.array([len(prompt) for prompt in prompts], dtype=np.int64)


def _portions(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges of prompts to prefill together: few tokens at once, and lengths not too different."""
    start = 0
    while start < len(lengths):
        end, total, longest = start, 0, 0
        while end < len(lengths):
            total, longest = total + lengths[end], max(longest, lengths[end])
            if end > start and (total > PREFILL_TOKENS or longest * (end + 1 - start) > RAGGED * total):
                break
            end += 1
        yield start, end
        start = end
