"""Log-probabilities of given completions under a causal language model, shared by learner and reference.

Rows are right-padded, so every row's positions are 0, 1, 2 … and need not be given; which of them count comes from
lengths alone, never from the pad id. Only hidden states that predict a completion token reach the output head, and they
do so in chunks, so the full [B, T, V] logits never exist.

Log-softmax runs in float32 (float64 in a float64 model) whatever the compute type, on logits / temperature: a policy
that was sampled at temperature 0.7 must be trained at 0.7, or the ratio of an untouched policy is not 1 (TRL issue
3029). With kept ids the policy's log-probability is renormalised over exactly the kept set (TRL issue 6789: without it
every ratio is off by the kept mass); KL and entropy use the full distribution.

Supported: every Hugging Face causal model. Where logits are exactly head(last hidden state) the head runs alone;
models that scale or cap their final logits (Gemma 2, Cohere, Granite) are recognised by a probe and take a full forward
with `logits_to_keep`, which costs the memory of the completion's logits once. Mixture-of-experts load balancing losses
and dropout are not part of this forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from grpo_engine.types import TrainRow

CHUNK_ELEMENTS = 2**24
"""Logits alive at once: 64 MiB in float32."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """B right-padded rows of width T, and the N completion tokens in them, row after row."""

    input_ids_BT: Tensor
    attention_mask_BT: Tensor
    row_N: Tensor
    position_N: Tensor
    """Where the hidden state sits that predicts each completion token."""
    target_N: Tensor
    lengths: list[int]
    """[B] completion tokens of each row; they sum to N."""
    kept_ids: list[list[int]] | None
    """[N][kept] ids that truncated sampling kept; None without truncation."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What the model says of each completion token; all [N], float32 nats unless the model is float64."""

    policy: Tensor
    """Under the distribution that was sampled from: renormalised over the kept ids when there are any."""
    full: Tensor
    """Under the untruncated distribution at the same temperature."""
    entropy: Tensor
    """Of the full distribution; carries no gradient."""
    correct: Tensor
    """bool: the token is the likeliest one."""


def micro_batches(rows: Sequence[TrainRow], max_rows: int) -> list[list[int]]:
    """Indices of `rows` in micro-batches of at most `max_rows`, longest first so that rows of a batch pad little.

    The order depends on lengths and positions only: the same rows always meet in the same batches."""
    lengths = [len(row.prompt_ids) + len(row.completion_ids) for row in rows]
    order = sorted(range(len(rows)), key=lambda index: -lengths[index])
    return [order[start : start + max_rows] for start in range(0, len(order), max_rows)]


def collate(rows: Sequence[TrainRow], *, pad_token_id: int, device: torch.device, pad_to: int = 0) -> TokenBatch:
    """Rows to tensors, padded to the longest row or `pad_to`.

    Raises ValueError for a row without prompt, for kept ids in only some rows, and for kept ids that do not hold the
    sampled token."""
    sequences = [[*row.prompt_ids, *row.completion_ids] for row in rows]
    width = max([pad_to, *map(len, sequences)])
    input_ids_BT = torch.full((len(rows), width), pad_token_id, dtype=torch.long)
    for index, (row, sequence) in enumerate(zip(rows, sequences, strict=True)):
        if not row.prompt_ids:
            raise ValueError(f"row {index} has an empty prompt: its first completion token has nothing to follow")
        input_ids_BT[index, : len(sequence)] = torch.tensor(sequence, dtype=torch.long)
    arange_T = torch.arange(width)
    lengths_B = torch.tensor([len(sequence) for sequence in sequences])
    lengths = [len(row.completion_ids) for row in rows]
    # The hidden state at position p predicts the token at p + 1.
    starts = [len(row.prompt_ids) - 1 for row in rows]
    positions = [p for start, length in zip(starts, lengths, strict=True) for p in range(start, start + length)]
    return TokenBatch(
        input_ids_BT=input_ids_BT.to(device),
        attention_mask_BT=(arange_T < lengths_B[:, None]).long().to(device),
        row_N=torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths)).to(device),
        position_N=torch.tensor(positions, dtype=torch.long, device=device),
        target_N=torch.tensor([t for row in rows for t in row.completion_ids], dtype=torch.long, device=device),
        lengths=lengths,
        kept_ids=_flat_kept_ids(rows),
    )


def _flat_kept_ids(rows: Sequence[TrainRow]) -> list[list[int]] | None:
    if all(row.kept_ids is None for row in rows):
        return None
    flat: list[list[int]] = []
    for index, row in enumerate(rows):
        if row.kept_ids is None or len(row.kept_ids) != len(row.completion_ids):
            raise ValueError(f"row {index}: kept_ids must be given for each of its {len(row.completion_ids)} tokens")
        for token, kept in zip(row.completion_ids, row.kept_ids, strict=True):
            if token not in kept:
                raise ValueError(f"row {index}: sampled token {token} is not among the kept ids {kept[:20]}")
        flat.extend(row.kept_ids)
    return flat


class LogprobForward:
    """One forward pass of a model over a TokenBatch. Puts the model into eval mode: dropout would break ratio = 1."""

    def __init__(self, model: PreTrainedModel, *, dtype: str = "float32", chunk_elements: int = CHUNK_ELEMENTS) -> None:
        self.model = model
        model.train(False)
        self.device = model.device
        self._autocast_bfloat16 = dtype == "bfloat16"
        self._chunk_elements = chunk_elements
        self._vocabulary: int = _head(model).weight.shape[0]
        self.head_is_separate = head_is_separate(model)

    def __call__(self, batch: TokenBatch, temperature: float) -> TokenLogprobs:
        """Raises ValueError unless temperature > 0."""
        if not temperature > 0:
            raise ValueError(f"temperature {temperature} must be above 0: log-probabilities of greedy choice are all 0")
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._autocast_bfloat16):
            features_NF, head = self._hidden_states(batch) if self.head_is_separate else self._logits(batch)
            return self._in_chunks(features_NF, head, batch, temperature)

    def _hidden_states(self, batch: TokenBatch) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        output = self.model.base_model(**_inputs(batch), use_cache=False)
        return _select(output.last_hidden_state, batch, first_position=0), _head(self.model)

    def _logits(self, batch: TokenBatch) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        width = batch.input_ids_BT.shape[1]
        arguments = _inputs(batch)
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters and batch.lengths:
            arguments["logits_to_keep"] = width - min(batch.position_N.tolist(), default=0)
        logits_BKV = self.model(**arguments, use_cache=False).logits
        return _select(logits_BKV, batch, first_position=width - logits_BKV.shape[1]), lambda logits: logits

    def _in_chunks(
        self, features_NF: Tensor, head: Callable[[Tensor], Tensor], batch: TokenBatch, temperature: float
    ) -> TokenLogprobs:
        size = max(1, self._chunk_elements // self._vocabulary)
        bounds = [*range(0, len(batch.target_N), size), len(batch.target_N)]
        recompute = len(bounds) > 2 and features_NF.requires_grad
        parts = []
        for start, end in pairwise(bounds):
            kept = None if batch.kept_ids is None else _pad_kept(batch.kept_ids[start:end], self.device)
            arguments = (head, features_NF[start:end], batch.target_N[start:end], kept, temperature)
            if recompute:  # only one chunk's logits are alive, in the backward pass too
                parts.append(checkpoint(_score, *arguments, use_reentrant=False, preserve_rng_state=False))
            else:
                parts.append(_score(*arguments))
        if not parts:
            nothing = features_NF.new_zeros(0)
            return TokenLogprobs(nothing, nothing, nothing, nothing.bool())
        return TokenLogprobs(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _score(
    head: Callable[[Tensor], Tensor],
    features_CF: Tensor,
    target_C: Tensor,
    kept: tuple[Tensor, Tensor] | None,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """policy, full, entropy, correct of C tokens."""
    logits_CV = head(features_CF)
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)) / temperature
    target_logit_C = logits_CV.gather(1, target_C[:, None]).squeeze(1)
    full_C = target_logit_C - logits_CV.logsumexp(1)
    policy_C = full_C
    if kept is not None:
        kept_ids_CK, is_kept_CK = kept
        kept_logits_CK = logits_CV.gather(1, kept_ids_CK).masked_fill(~is_kept_CK, -torch.inf)
        policy_C = target_logit_C - kept_logits_CK.logsumexp(1)
    with torch.no_grad():
        entropy_C = torch.special.entr(logits_CV.softmax(1)).sum(1)
        correct_C = logits_CV.argmax(1) == target_C
    return policy_C, full_C, entropy_C, correct_C


def _pad_kept(kept_ids: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """[C, K] ids padded with 0, and True where an id is real."""
    ids_CK = pad_sequence([torch.tensor(kept) for kept in kept_ids], batch_first=True)
    sizes_C = torch.tensor([len(kept) for kept in kept_ids])
    return ids_CK.to(device), (torch.arange(ids_CK.shape[1]) < sizes_C[:, None]).to(device)


def _inputs(batch: TokenBatch) -> dict[str, Tensor | int]:
    return {"input_ids": batch.input_ids_BT, "attention_mask": batch.attention_mask_BT}


def _select(features_BTF: Tensor, batch: TokenBatch, *, first_position: int) -> Tensor:
    index_N = batch.row_N * features_BTF.shape[1] + batch.position_N - first_position
    return features_BTF.flatten(0, 1).index_select(0, index_N)


def _head(model: PreTrainedModel) -> Any:
    return model.get_output_embeddings()  # type: ignore[no-untyped-call]


@torch.no_grad()
def head_is_separate(model: PreTrainedModel) -> bool:
    """True when the model's logits are, bit for bit, its output embeddings applied to the last hidden state."""
    head, base = _head(model), model.base_model
    if head is None or base is model:
        return False
    ids = torch.arange(4, device=model.device)[None] % head.weight.shape[0]
    alone = head(base(input_ids=ids, use_cache=False).last_hidden_state)
    whole = model(input_ids=ids, use_cache=False).logits
    # All-zero logits would hide a scale or a cap.
    return bool(alone.any()) and torch.equal(alone, whole)
