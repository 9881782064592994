"""Which kind of rows a model is decoded with: a probe decides."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from grpo_engine.model.attention import has_packed_attention, use_plain_attention
from grpo_engine.model.logprobs import packing_is_exact
from grpo_engine.model.memory_limit import is_out_of_memory
from grpo_engine.rollout.forward import Forward
from grpo_engine.rollout.lean import lean_layers
from grpo_engine.rollout.padded_rows import PaddedRows
from grpo_engine.rollout.rows import Rows, SharedRows

log = logging.getLogger("cohort")
PROBE_TOLERANCE = 1e-4
"""Largest difference of cached and plain logits, relative to the largest of them; wrong attention is far off."""


def open_rows(forward: Forward, *, shared: bool, room_tokens: int) -> Rows:
    """An empty batch; `shared` as `shared_rows_are_exact` said, `room_tokens` as SharedRows has it."""
    forward.uses_lean = forward.lean is not None and not forward.lean.are_watched
    return SharedRows(forward, room_tokens=room_tokens) if shared else PaddedRows(forward)


@torch.no_grad()
def shared_rows_are_exact(forward: Forward) -> bool:
    """Set our attention on the model and decode a tiny ragged batch; where logits differ from those of plain forward
    passes, or the model refuses, its attention is restored and the answer is False. What somebody had set stays."""
    was_set, exact = has_packed_attention(forward.model), False
    try:
        exact = packing_is_exact(forward.model) and _shared_equals_plain(forward)
    except Exception as error:  # models raise whatever they like
        if is_out_of_memory(error):
            raise
        log.debug("shared prompts", exc_info=True)
    finally:
        if not exact and not was_set:
            use_plain_attention(forward.model)
    if exact:
        _use_lean_layers(forward)
    else:
        log.info("%s cannot share prompts between rows: each row keeps a copy", type(forward.model).__name__)
    return exact


def _use_lean_layers(forward: Forward) -> None:
    """Steps go through layers written out where the same tiny batch comes out right."""
    forward.lean = lean_layers(forward.model)
    forward.uses_lean = True
    try:
        exact = _shared_equals_plain(forward)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        log.debug("lean layers", exc_info=True)
        exact = False
    if not exact:
        forward.lean = None


def _shared_equals_plain(forward: Forward) -> bool:
    """Two groups, drafts of which some are refused, a row that leaves."""
    vocabulary = forward.model.get_input_embeddings().weight.shape[0]
    prompts = [[token % vocabulary for token in prompt] for prompt in ([5, 3, 7], [8])]
    fed = torch.tensor([[2, 9], [11, 4], [6, 1]], device=forward.device) % vocabulary
    rows = SharedRows(forward)
    rows.admit(prompts, [2, 1])
    first = rows.feed(fed).logits_BQV
    rows.keep(torch.tensor([1, 2, 2]))
    rows.select(torch.tensor([0, 2]))
    second = rows.feed(fed[[0, 2], 1:]).logits_BQV
    exact = [
        (first[1, 1], _plain(forward, [*prompts[0], *fed[1].tolist()])),
        (second[0, 0], _plain(forward, [*prompts[0], *fed[0].tolist()])),
        (second[1, 0], _plain(forward, [*prompts[1], *fed[2].tolist(), int(fed[2, 1])])),
    ]
    return all(bool(((ours - plain).abs() <= PROBE_TOLERANCE * plain.abs().max()).all()) for ours, plain in exact)


def _plain(forward: Forward, tokens: list[int]) -> Tensor:
    """[V] logits that follow the tokens."""
    logits: Tensor = forward.model(input_ids=torch.tensor([tokens], device=forward.device), use_cache=False).logits
    return logits[0, -1]
