"""The token limit of a forward and backward pass, and what happens when memory does not hold it.

Learner and critic run their micro-batches through `run_micro_batches`. A pass that runs out of memory halves the
limit, and its caller begins the whole piece of work again, so that the result is that of a run which had the smaller
limit from the start. The limit never rises again: the next step has sequences as long as these.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grpo_engine.errors import OutOfMemory
from grpo_engine.model.packing import micro_batches, num_packed_tokens
from grpo_engine.types import TrainRow

log = logging.getLogger("cohort")
RAN_OUT = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What the CPU's allocator, CUDA itself and cuBLAS say."""


class TokenLimit:
    """Tokens of one pass; `notices` tells people of every change, and so does the log."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        self.tokens = tokens
        self.device = device
        self.notices: list[str] = []

    def halve(self, rows: Sequence[TrainRow], *, packed: bool) -> None:
        """After a pass over `rows` ran out of memory. Raises OutOfMemory when it was a single row."""
        widest = max(len(row.prompt_ids) + len(row.completion_ids) for row in rows)
        tried = num_packed_tokens(rows) if packed else len(rows) * widest
        if len(rows) == 1:
            raise OutOfMemory(
                f"one row of {tried} tokens does not fit into the memory of {self.device}; lower "
                f"sampling.max_new_tokens, or set memory.gradient_checkpointing to full and dtype to bfloat16"
            )
        self.lower(max(1, min(self.tokens, tried) // 2), f"a pass over {tried} tokens ran out of memory")
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def lower(self, tokens: int, reason: str) -> None:
        """To `tokens` unless it is that low already."""
        if tokens < self.tokens:
            self.notices.append(
                f"{reason}: passes have at most {tokens} tokens from now on, not {self.tokens}; set "
                f"memory.max_micro_batch_tokens to {tokens} to start there"
            )
            log.warning("%s", self.notices[-1])
            self.tokens = tokens


def run_micro_batches(
    rows: Sequence[TrainRow], limit: TokenLimit, work: Callable[[list[int], list[TrainRow]], None], *, packed: bool
) -> bool:
    """Call `work(indices, rows of them)` for each micro-batch.

    False: memory ran out, the limit was halved; undo what `work` did and call again. Raises OutOfMemory when a single
    row is too long."""
    for indices in micro_batches(rows, limit.tokens, packed=packed):
        part = [rows[index] for index in indices]
        ran_out = False
        try:
            work(indices, part)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            ran_out = True
        if ran_out:  # after the except clause: the traceback keeps the activations alive
            limit.halve(part, packed=packed)
            return False
    return True


def in_row_order(rows: Sequence[TrainRow], found: Sequence[tuple[Sequence[int], Tensor]]) -> list[Tensor]:
    """What `work` found a micro-batch at a time, [..., N] with the indices of its rows: [..., T] for each row.

    On the CPU, after one copy from the device for all of them."""
    order = [index for indices, _ in found for index in indices]
    if not order:
        return []
    values = torch.cat([part for _, part in found], dim=-1).cpu()
    pieces = torch.split(values, [len(rows[index].completion_ids) for index in order], dim=-1)
    of_row = dict(zip(order, pieces, strict=True))
    return [of_row[index] for index in range(len(rows))]


def is_out_of_memory(error: BaseException) -> bool:
    """torch raises a type of its own where its CUDA allocator fails, and a plain RuntimeError elsewhere."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(words in str(error) for words in RAN_OUT)
