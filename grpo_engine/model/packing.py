"""Rows to micro-batches under a token budget, and micro-batches to tensors, packed without padding or padded.

Packed, a micro-batch is one sequence of N tokens; rows with equal prompts share the prompt's tokens. The last token of
a completion predicts nothing and is not fed. Padded batches serve models whose attention cannot be packed
(`LogprobForward.packed`); rows are padded on the right, and what counts comes from lengths, never from the pad id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from grpo_engine.model.attention import Buckets, PackedLayout, build_buckets, layout_to
from grpo_engine.types import TrainRow

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KeptIds:
    """What truncated sampling kept for each of N tokens, one after the other."""

    ids_M: Tensor
    """int64 ids of all tokens."""
    sizes: list[int]
    """[N] ids of each token; they sum to M."""

    def padded(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """[C, K] ids of tokens [start, end), padded with 0, and True where an id is real."""
        device = self.ids_M.device
        first = sum(self.sizes[:start])
        sizes_C = torch.tensor(self.sizes[start:end], device=device)
        is_real_CK = torch.arange(int(sizes_C.max()), device=device) < sizes_C[:, None]
        ids_CK = torch.zeros(is_real_CK.shape, dtype=torch.long, device=device)
        ids_CK[is_real_CK] = self.ids_M[first : first + int(sizes_C.sum())]
        return ids_CK, is_real_CK


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """B rows as model inputs, and the N completion tokens in them, row after row."""

    input_ids: Tensor
    """Packed [1, tokens]; padded [B, T]."""
    position_ids: Tensor
    """As input_ids: each token's position in its row."""
    layout: PackedLayout | None
    """How attention finds the rows in a packed batch; None in a padded one."""
    attention_mask: Tensor | None
    """[B, T] int64, 1 = real token; None in a packed batch."""
    feature_index: Tensor
    """[N] where the hidden state sits that predicts each completion token, in the flattened [tokens] or [B·T]."""
    target_N: Tensor
    row_N: Tensor
    position_in_completion_N: Tensor
    """0-based."""
    lengths: list[int]
    """[B] completion tokens of each row; they sum to N."""
    kept_ids: KeptIds | None
    """None without truncation."""
    first_position: int
    """Padded: smallest position in any row that predicts a completion token."""


# ---------------------------------------------------------------- micro-batches
def micro_batches(rows: Sequence[TrainRow], max_tokens: int, *, packed: bool = True) -> list[list[int]]:
    """Indices of `rows` in micro-batches of at most `max_tokens`; a row above that goes alone.

    Best fit by decreasing length, where a prompt that a batch already holds costs nothing, so that rows with equal
    prompts meet. Not packed, tokens are rows x longest row, and rows of similar length meet. The same rows always give
    the same batches; within a batch they keep their order."""
    if max_tokens < 1:
        raise ValueError(f"max_tokens {max_tokens} must be at least 1")
    return _packed_batches(rows, max_tokens) if packed else _padded_batches(rows, max_tokens)


def num_packed_tokens(rows: Sequence[TrainRow]) -> int:
    """Tokens that the dense layers compute for these rows in one micro-batch."""
    with_loss = [row for row in rows if row.completion_ids]
    prompts = {tuple(row.prompt_ids) for row in with_loss}
    return sum(map(len, prompts)) + sum(len(row.completion_ids) - 1 for row in with_loss)


def _packed_batches(rows: Sequence[TrainRow], max_tokens: int) -> list[list[int]]:
    numbers: dict[tuple[int, ...], int] = {}
    prompt_of = [numbers.setdefault(tuple(row.prompt_ids), len(numbers)) for row in rows]
    rests = [max(0, len(row.completion_ids) - 1) for row in rows]
    costs = [len(row.prompt_ids) if row.completion_ids else 0 for row in rows]
    order = sorted(range(len(rows)), key=lambda index: (-(costs[index] + rests[index]), prompt_of[index], index))
    batches: list[list[int]] = []
    room: list[int] = []
    held: list[set[int]] = []
    for index in order:
        best, best_key = -1, (0, 0)
        for batch, free in enumerate(room):
            cost = rests[index] + (0 if prompt_of[index] in held[batch] else costs[index])
            if cost <= free and (best < 0 or (cost, free) < best_key):
                best, best_key = batch, (cost, free)
        if best < 0:
            best, best_key = len(batches), (costs[index] + rests[index], 0)
            batches.append([])
            room.append(max_tokens)
            held.append(set())
        batches[best].append(index)
        room[best] -= best_key[0]
        if costs[index]:
            held[best].add(prompt_of[index])
    return sorted(map(sorted, batches))


def _padded_batches(rows: Sequence[TrainRow], max_tokens: int) -> list[list[int]]:
    lengths = [len(row.prompt_ids) + max(0, len(row.completion_ids) - 1) for row in rows]
    batches: list[list[int]] = []
    width = 1
    for index in sorted(range(len(rows)), key=lambda index: -lengths[index]):
        if not batches or (len(batches[-1]) + 1) * width > max_tokens:
            batches.append([])
            width = max(1, lengths[index])
        batches[-1].append(index)
    return sorted(map(sorted, batches))


# ---------------------------------------------------------------- tensors
def collate(
    rows: Sequence[TrainRow], *, device: torch.device, packed: bool, pad_token_id: int = 0, pad_to: int = 0
) -> TokenBatch:
    """Rows to tensors on `device`. Padded rows are as wide as the longest or `pad_to`.

    Raises ValueError for a row without prompt, for kept ids in only some rows, and for kept ids that do not hold the
    sampled token."""
    for index, row in enumerate(rows):
        if not row.prompt_ids:
            raise ValueError(f"row {index} has an empty prompt: its first completion token has nothing to follow")
    lengths = [len(row.completion_ids) for row in rows]
    length_B = np.array(lengths, dtype=np.int64)
    row_N = np.repeat(np.arange(len(rows)), length_B)
    step_N = np.arange(len(row_N)) - np.repeat(length_B.cumsum() - length_B, length_B)
    target_N = np.array([token for row in rows for token in row.completion_ids], dtype=np.int64)
    inputs = _packed(rows, row_N, step_N) if packed else _padded(rows, row_N, step_N, pad_token_id, pad_to)
    return TokenBatch(
        input_ids=_tensor(inputs.input_ids, device),
        position_ids=_tensor(inputs.position_ids, device),
        layout=None if inputs.buckets is None else layout_to(inputs.buckets, device),
        attention_mask=None if inputs.is_real is None else _tensor(inputs.is_real, device),
        feature_index=_tensor(inputs.feature_index, device),
        target_N=_tensor(target_N, device),
        row_N=_tensor(row_N, device),
        position_in_completion_N=_tensor(step_N, device),
        lengths=lengths,
        kept_ids=_kept_ids(rows, target_N, row_N, device),
        first_position=inputs.first_position,
    )


class _Inputs(NamedTuple):
    input_ids: Integers
    position_ids: Integers
    feature_index: Integers
    buckets: Buckets | None = None
    is_real: Integers | None = None
    first_position: int = 0


def _packed(rows: Sequence[TrainRow], row_N: Integers, step_N: Integers) -> _Inputs:
    """Each prompt once, at its first row, and each row's completion without its last token."""
    tokens: list[int] = []
    prompts: dict[tuple[int, ...], int] = {}
    prompt_starts, rest_starts = [], []
    for row in rows:
        if row.completion_ids:
            start = prompts.setdefault(tuple(row.prompt_ids), len(tokens))
            if start == len(tokens):
                tokens.extend(row.prompt_ids)
            prompt_starts.append(start)
            rest_starts.append(len(tokens))
            tokens.extend(row.completion_ids[:-1])
    if not tokens:
        nothing = np.zeros((1, 0), dtype=np.int64)
        return _Inputs(nothing, nothing, nothing[0])
    filled = [row for row in rows if row.completion_ids]
    prompt_B = np.array([len(row.prompt_ids) for row in filled])
    length_B = prompt_B + [len(row.completion_ids) - 1 for row in filled]
    start_B, rest_B = np.array(prompt_starts), np.array(rest_starts)
    buckets = build_buckets(start_B, prompt_B, rest_B, length_B, len(tokens))
    # The last prompt token predicts the first of the completion.
    filled_N = np.cumsum([bool(row.completion_ids) for row in rows])[row_N] - 1
    feature_index = np.where(step_N == 0, (start_B + prompt_B)[filled_N] - 1, rest_B[filled_N] + step_N - 1)
    return _Inputs(np.array([tokens]), buckets.position_N[None], feature_index, buckets)


def _padded(rows: Sequence[TrainRow], row_N: Integers, step_N: Integers, pad_token_id: int, pad_to: int) -> _Inputs:
    sequences = [[*row.prompt_ids, *row.completion_ids[:-1]] for row in rows]
    width = max([pad_to, 1, *map(len, sequences)])
    input_ids = np.full((len(rows), width), pad_token_id, dtype=np.int64)
    for index, sequence in enumerate(sequences):
        input_ids[index, : len(sequence)] = sequence
    position_BT = np.broadcast_to(np.arange(width), input_ids.shape).copy()
    length_B = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    # The hidden state at position p predicts the token at p + 1.
    first_B = np.array([len(row.prompt_ids) - 1 for row in rows], dtype=np.int64)
    feature_index = row_N * width + first_B[row_N] + step_N
    first = int(first_B[row_N].min()) if len(row_N) else 0
    is_real = (np.arange(width) < length_B[:, None]).astype(np.int64)
    return _Inputs(input_ids, position_BT, feature_index, None, is_real, first)


def _kept_ids(rows: Sequence[TrainRow], target_N: Integers, row_N: Integers, device: torch.device) -> KeptIds | None:
    if all(row.kept_ids is None for row in rows):
        return None
    kept: list[list[int]] = []
    for index, row in enumerate(rows):
        if len(row.kept_ids or ()) != len(row.completion_ids):
            raise ValueError(f"row {index}: kept_ids must be given for each of its {len(row.completion_ids)} tokens")
        kept.extend(row.kept_ids or ())
    sizes = [len(ids) for ids in kept]
    ids_M = np.array([token for ids in kept for token in ids], dtype=np.int64)
    token_M = np.repeat(np.arange(len(kept)), sizes)
    holds_N = np.bincount(token_M[ids_M == target_N[token_M]], minlength=len(kept)) > 0
    if not holds_N.all():
        at = int(holds_N.argmin())
        message = f"sampled token {target_N[at]} is not among the kept ids {kept[at][:20]}"
        raise ValueError(f"row {row_N[at]}: {message}")
    return KeptIds(_tensor(ids_M, device), sizes)


def _tensor(values: Integers, device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device)
