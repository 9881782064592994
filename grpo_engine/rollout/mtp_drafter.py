"""Drafts by the policy's own multi-token prediction heads (model/mtp.py).

Slot i of a row joins the hidden state that predicted completion token x_i with x_i itself, so a row with n tokens, the
pending one included, has n slots. Block k at slot n - 1 guesses the k-th token after the pending one; the token it
reads there is the draft of block k - 1, at earlier slots the row's own. A draft longer than there are blocks goes on
with the last block, one slot further each time, its own hidden state standing in for the policy's.

Between drafts only the last hidden states and tokens of a row are kept, CATCH_UP of them. The next draft computes the
slots that its blocks have missed since, all rows side by side, their newest slots aligned; a block that missed more
forgets the row's older ones. Steps without drafts are written down many at a time, so that they cost next to nothing,
however long drafts stay away. Blocks attend over the last WINDOW slots, and their caches hold no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from grpo_engine.config import SamplingConfig
from grpo_engine.errors import InvalidConfig, Problem
from grpo_engine.model.mtp import MTPBlock, MTPHeads, head_logits
from grpo_engine.rollout.choice import draw
from grpo_engine.rollout.drafting import Drafts
from grpo_engine.rollout.lean_block import LeanBlock

CATCH_UP = 16
"""Slots that one draft computes at most, unless steady drafting needs more. Further ones would make a rare draft cost
as much as it saves, and tell little: hidden states know the whole row. (Measured: 12 layers, chains of sums, drafts
that see 8 slots are accepted 1.2 points less often than those that see the row.)"""
WINDOW = 128
"""Slots that a block attends over. Training knows no such limit; the note above tells how little lies beyond."""


class MTPDrafter:
    """Implements `drafting.Drafter`. Reads heads, embeddings and output head of the module that trains, so that an
    update needs nothing; hidden states of older weights stay until the row ends."""

    samples = True

    def __init__(self, heads: MTPHeads, model: PreTrainedModel, max_tokens: int) -> None:
        """`max_tokens`: longest draft that will be asked for."""
        self.max_tokens = max_tokens
        self._heads = heads
        self._model = model
        untyped: Any = model
        self._embedding: nn.Module = untyped.get_input_embeddings()
        self._device = heads.frequency_F.device
        self._catch_up = max(CATCH_UP, max_tokens + heads.depth)
        self._room = self._catch_up + max_tokens + 1  # what a step writes and does not keep must spare what is read
        self._num_B = torch.zeros(0, dtype=torch.long, device=self._device)
        """Tokens of each row, the pending one included."""
        self._tokens_BR = torch.zeros(0, self._room, dtype=torch.long, device=self._device)
        self._hidden_BRH = torch.zeros(0, self._room, heads.each()[0].shape.hidden, device=self._device)
        """The last slots of each row, slot i at place i % room."""
        self._unwritten: list[tuple[Tensor, Tensor, Tensor]] = []
        """Tokens [B, 1], counts and hidden states of the steps since: those that are not in the tensors above yet."""
        self._num_places = WINDOW + self._catch_up + max_tokens
        self._caches = [SlotCache(block, self._num_places, self._device) for block in heads.each()]

    # ------------------------------------------------------------ rows
    def admit(self, prompts: Sequence[Sequence[int]], first_tokens_B: Tensor, hidden_BH: Tensor) -> None:
        """New rows at the end, of one slot each; prompts do not matter here.

        Raises InvalidConfig when the model gives no hidden states."""
        if len(hidden_BH) != len(first_tokens_B):
            message = f"{type(self._model).__name__} does more to its logits than apply its output head, and drafting"
            message += " heads read what that head reads"
            raise InvalidConfig([Problem("rollout.drafts.kind", "mtp", message, "use ngram or none")])
        self._write()
        old, new = len(self._num_B), len(first_tokens_B)
        self._num_B = _longer(self._num_B, new)
        self._tokens_BR = _longer(self._tokens_BR, new)
        self._hidden_BRH = _longer(self._hidden_BRH.to(hidden_BH.dtype), new)
        self._num_B[old:] = 1
        self._tokens_BR[old:, 0] = first_tokens_B
        self._hidden_BRH[old:, 0] = hidden_BH
        for cache in self._caches:
            cache.admit(new)

    def select(self, rows: Tensor) -> None:
        """Go on with these rows only, in this order."""
        self._write()
        self._num_B, self._tokens_BR, self._hidden_BRH = (
            tensor.index_select(0, rows) for tensor in (self._num_B, self._tokens_BR, self._hidden_BRH)
        )
        for cache in self._caches:
            cache.select(rows)

    def confirm(self, tokens_BQ: Tensor, count_B: Tensor, hidden_BQH: Tensor) -> None:
        """Row b gained tokens_BQ[b, :count_B[b]] (none where 0); hidden_BQH[b, i] predicted tokens_BQ[b, i]."""
        is_drafted = tokens_BQ.shape[1] > 1
        if is_drafted or len(self._unwritten) == self._catch_up:
            self._write()
        self._unwritten.append((tokens_BQ, count_B.to(self._device), hidden_BQH))
        if is_drafted:
            self._write()

    def _write(self) -> None:
        """Write down the last steps: one with drafts, or up to `_catch_up` without, which then fit side by side."""
        if not self._unwritten:
            return
        tokens, counts, hidden = zip(*self._unwritten, strict=True)
        counts_BT = torch.stack(counts, dim=1)
        before_BT = counts_BT.cumsum(1) - counts_BT
        tokens_BQ, hidden_BQH = torch.cat(tokens, dim=1), torch.cat(hidden, dim=1)
        span_BQ = before_BT if len(tokens) > 1 else self._span(tokens_BQ.shape[1])
        place_BQ = (self._num_B[:, None] + span_BQ) % self._room
        # What is not kept is written as well: its place is written again before it is read.
        self._tokens_BR.scatter_(1, place_BQ, tokens_BQ)
        self._hidden_BRH[self._row_B1(), place_BQ] = hidden_BQH.to(self._hidden_BRH.dtype)
        self._num_B = self._num_B + counts_BT.sum(1)
        self._unwritten.clear()

    # ------------------------------------------------------------ drafts
    @torch.no_grad()
    def propose(self, num_tokens: int, sampling: SamplingConfig, uniforms_BK: Tensor | None) -> Drafts:
        """`num_tokens` > 0 drafts a row, sampled as the policy samples (temperature, truncation) with `uniforms_BK`
        (float64 in [0, 1)), or the likeliest where it is None. Waits for the device once."""
        self._write()
        used = self._caches[:num_tokens]
        width, longest = self._catch_up_on(used)
        num_seen = min(longest + num_tokens, self._num_places)
        window = self._window(self._num_B[:, None] + self._span(width) - width, num_seen)
        tokens_BQ = self._tokens_BR.gather(1, window.slot_BQ % self._room)
        hidden_BQH = self._hidden_BRH[window.row_B1, window.slot_BQ % self._room]
        numbers = [None] * num_tokens if uniforms_BK is None else uniforms_BK.unbind(1)
        tokens, logprobs = [], []
        for index in range(num_tokens):
            cache = self._caches[min(index, len(used) - 1)]
            if index >= len(used):
                window = self._window(window.slot_BQ[:, -1:] + 1, num_seen)
                tokens_BQ, hidden_BQH = tokens_BQ[:, -1:], hidden_BQH[:, -1:]
            hidden_BQH = cache.run(hidden_BQH, self._embedding(tokens_BQ), window)
            features_BH = cache.block.features(hidden_BQH[:, -1])
            drafted_B, logprobs_BV = self._draw(features_BH, sampling, numbers[index])
            tokens_BQ = torch.cat([tokens_BQ[:, 1:], drafted_B[:, None]], dim=1)
            tokens.append(drafted_B)
            logprobs.append(logprobs_BV)
        for depth, cache in enumerate(used):
            cache.true_B = self._num_B - depth  # later slots of block `depth` have read drafts
        all_BKV = [each for each in logprobs if each is not None]
        full_B = torch.full_like(self._num_B, num_tokens)
        return Drafts(torch.stack(tokens, dim=1), full_B, torch.stack(all_BKV, dim=1) if all_BKV else None)

    def _catch_up_on(self, used: Sequence[SlotCache]) -> tuple[int, int]:
        """Slots to compute of every row, and slots of the longest; blocks that have missed more forget what lies before
        them."""
        missed_DB = self._num_B - torch.stack([cache.true_B for cache in used])
        missed, longest = map(int, torch.stack([missed_DB.amax(), self._num_B.amax()]).tolist())
        width = min(max(1, missed), self._catch_up)
        if missed > width:
            for cache in used:
                first_B = self._num_B - width
                cache.start_B = torch.where(cache.true_B < first_B, first_B, cache.start_B)
        return width, longest

    def _draw(
        self, features_BH: Tensor, sampling: SamplingConfig, uniforms_B: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        logits_BV = head_logits(self._model, features_BH)
        if uniforms_B is None:
            return logits_BV.argmax(-1), None
        return draw(logits_BV, sampling, uniforms_B)

    def _window(self, slot_BQ: Tensor, num_seen: int) -> Window:
        newest_B1 = slot_BQ[:, -1:]
        held_BS = newest_B1 - (newest_B1 - self._span(num_seen)) % self._num_places
        ago_BQS = slot_BQ[..., None] - held_BS[:, None]
        seen_BQS = (ago_BQS >= 0) & (ago_BQS < WINDOW)
        return Window(
            slot_BQ, slot_BQ % self._num_places, held_BS, seen_BQS, self._row_B1(), self._heads.rotation(slot_BQ)
        )

    def _span(self, count: int) -> Tensor:
        return torch.arange(count, device=self._device)

    def _row_B1(self) -> Tensor:
        return torch.arange(len(self._num_B), device=self._device)[:, None]


@dataclass(frozen=True, slots=True)
class Window:
    """What a pass over Q consecutive slots of every row needs to know of them, whatever the block."""

    slot_BQ: Tensor
    """Below 0 where a row has fewer slots than are computed; nothing reads what comes of those."""
    place_BQ: Tensor
    """Where the caches keep them."""
    held_BS: Tensor
    """Slot that each of the first S places holds, or would if it was computed; no row has used the others."""
    seen_BQS: Tensor
    """Places that a slot may look at if they belong to the row."""
    row_B1: Tensor
    rotation: tuple[Tensor, Tensor]


class SlotCache:
    """Keys and values of one block for the newest slots of every row: slot s at place s % num_places. There are so many
    places that a slot which was drafted and not kept lies on none that a later one still looks at."""

    def __init__(self, block: MTPBlock, num_places: int, device: torch.device) -> None:
        self.block = LeanBlock(block)
        self._num_places = num_places
        self.true_B = torch.zeros(0, dtype=torch.long, device=device)
        """Slots [start, true) of a row are computed from its own tokens."""
        self.start_B = self.true_B
        # No places before the first draft: many runs of many rows never draft.
        shape = (0, 0, block.shape.num_key_value_heads, block.shape.head_size)
        self._keys_BSND = self._values_BSND = torch.zeros(shape, dtype=block.qkv.weight.dtype, device=device)

    def admit(self, count: int) -> None:
        self.true_B, self.start_B = _longer(self.true_B, count), _longer(self.start_B, count)
        self._keys_BSND, self._values_BSND = _longer(self._keys_BSND, count), _longer(self._values_BSND, count)

    def select(self, rows: Tensor) -> None:
        self.true_B, self.start_B = self.true_B.index_select(0, rows), self.start_B.index_select(0, rows)
        self._keys_BSND = self._keys_BSND.index_select(0, rows)
        self._values_BSND = self._values_BSND.index_select(0, rows)

    def run(self, hidden_BQH: Tensor, embedded_BQE: Tensor, window: Window) -> Tensor:
        """[B, Q, H] hidden states of the block at the window's slots, whose keys and values are kept."""
        stream_BQH, q, k, v = self.block.before_attention(hidden_BQH, embedded_BQE, window.rotation)
        if self._keys_BSND.shape[1] == 0:
            # Zeros: what was never written is masked, and NaN times 0 would be NaN.
            self._keys_BSND, self._values_BSND = k.new_zeros(2, len(k), self._num_places, *k.shape[2:]).unbind()
        self._keys_BSND[window.row_B1, window.place_BQ] = k
        self._values_BSND[window.row_B1, window.place_BQ] = v
        start_B11 = self.start_B[:, None, None]
        # A slot before the row's first sees everything: a softmax over nothing would be NaN.
        mask_BQS = window.seen_BQS & (window.held_BS[:, None] >= start_B11) | (window.slot_BQ[..., None] < start_B11)
        num_seen = mask_BQS.shape[2]
        keys, values = (kept[:, :num_seen].transpose(1, 2) for kept in (self._keys_BSND, self._values_BSND))
        attended = functional.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, attn_mask=mask_BQS[:, None], enable_gqa=q.shape[2] != k.shape[2]
        )
        return self.block.after_attention(stream_BQH, attended.transpose(1, 2))


def _longer(rows: Tensor, count: int) -> Tensor:
    """With `count` more rows of zeros."""
    return torch.cat([rows, rows.new_zeros(count, *rows.shape[1:])])
