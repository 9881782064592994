"""What a policy says of tokens that somebody chose greedily: their log-probabilities, and those of its own choice."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_engine.types import TrainRow


@dataclass(frozen=True, slots=True)
class GreedyScores:
    """Both [T], float32 nats under the full distribution at temperature 1."""

    chosen: list[float]
    """Of the row's completion tokens."""
    likeliest: list[float]
    """Of the likeliest token in each place; as `chosen` where that was taken."""


@torch.no_grad()
def greedy_scores(model: PreTrainedModel, rows: Sequence[TrainRow], dtype: str) -> list[GreedyScores]:
    """One row at a time without padding or cache: for a handful of short rows. `dtype` bfloat16 runs under autocast.

    The model is in evaluation mode, as the learner leaves it; an adapter counts."""
    scores = [_row_scores(model, row, dtype) for row in rows]
    host = torch.cat([torch.stack(pair) for pair in scores], dim=1).tolist() if scores else [[], []]
    found, start = [], 0
    for row in rows:
        end = start + len(row.completion_ids)
        found.append(GreedyScores(host[0][start:end], host[1][start:end]))
        start = end
    return found


def _row_scores(model: PreTrainedModel, row: TrainRow, dtype: str) -> tuple[Tensor, Tensor]:
    """([T] chosen, [T] likeliest) on the device."""
    count, device = len(row.completion_ids), model.device
    ids_1T = torch.tensor([[*row.prompt_ids, *row.completion_ids[:-1]]], device=device)
    target_T = torch.tensor(row.completion_ids, device=device)
    takes_count = "logits_to_keep" in inspect.signature(model.forward).parameters
    arguments = {"logits_to_keep": count} if takes_count else {}
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
        logits_TV = model(input_ids=ids_1T, use_cache=False, **arguments).logits[0, -count:]
    logprobs_TV = logits_TV.float().log_softmax(-1)
    return logprobs_TV.gather(1, target_T[:, None])[:, 0], logprobs_TV.amax(-1)
