"""Rows for models whose attention is not ours to replace, by nothing but transformers' standard cache interface.

All rows write their new token into the same column of the cache; shorter rows are padded on the left, and the padding
is masked. So distances between columns are distances between positions, which is what masks of sliding windows and
position biases are made of. Rows that keep fewer tokens of a step than others move to the right.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from grpo_engine.rollout.forward import Forward, Outputs
from grpo_engine.rollout.kv_cache import RowsCache

Integers = npt.NDArray[np.int64]


class PaddedRows:
    """Implements `rows.Rows`."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._cache: RowsCache | None = None
        self._lengths_B = np.zeros(0, dtype=np.int64)
        self._num_fed = 0

    @property
    def num_rows(self) -> int:
        return len(self._lengths_B)

    def admit(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> Outputs:
        lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
        width = int(lengths.max())
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=self._forward.device)
        cache = RowsCache()
        output = self._run(cache, ids, lengths - width, lengths)
        row_prompt = np.repeat(np.arange(len(prompts)), counts)
        rows = self._forward.tensor(row_prompt)
        cache.select_rows(rows)
        if self._cache is not None:
            cache = self._cache.joined(cache)
        self._cache = cache
        self._lengths_B = np.concatenate([self._lengths_B, lengths[row_prompt]])
        return Outputs(output.logits_BQV[:, -1:], _last(output.hidden_BQH)).select(rows)

    def feed(self, tokens_BQ: Tensor) -> Outputs:
        assert self._cache is not None
        self._num_fed = tokens_BQ.shape[1]
        return self._run(self._cache, tokens_BQ, self._lengths_B, self._lengths_B + self._num_fed)

    def keep(self, count_B: Tensor) -> None:
        assert self._cache is not None
        counts = np.asarray(count_B.tolist(), dtype=np.int64)
        most = int(counts.max())
        # A row that keeps nothing has ended: what it holds no longer matters.
        counts = np.where(counts == 0, most, counts)
        self._lengths_B = self._lengths_B + counts
        self._cache.crop_to(self._cache.get_seq_length() - self._num_fed + most)
        if (counts < most).any():
            self._cache.move_right(self._forward.tensor(most - counts))

    def select(self, rows: Tensor) -> None:
        kept = rows.to(self._forward.device)
        self._lengths_B = self._lengths_B[rows.cpu().numpy()]
        if self._cache is None or not len(kept):
            self._cache = None
            return
        self._cache.select_rows(kept)
        padding = self._cache.get_seq_length() - int(self._lengths_B.max())
        if padding > 0:
            self._cache.drop_left(padding)

    def _run(self, cache: RowsCache, ids_BQ: Tensor, start_B: Integers, lengths_B: Integers) -> Outputs:
        """Compute tokens whose positions begin at `start_B` (below 0: padding); rows then have `lengths_B`."""
        num_tokens = ids_BQ.shape[1]
        width = cache.get_seq_length() + num_tokens
        positions = start_B[:, None] + np.arange(num_tokens)
        positions = positions.clip(0, self._forward.max_context_tokens - 1)
        mask = None
        if lengths_B.min() < width:  # without padding no mask is passed: models then take their faster causal path
            mask = self._forward.tensor((np.arange(width) >= width - lengths_B[:, None]).astype(np.int64))
        arguments = {"past_key_values": cache, "use_cache": True, "attention_mask": mask}
        return self._forward(ids_BQ, self._forward.tensor(positions), arguments)


def _last(hidden_BQH: Tensor | None) -> Tensor | None:
    return None if hidden_BQH is None else hidden_BQH[:, -1:]
