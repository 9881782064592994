"""Drafts copied from the row itself: what followed the last few tokens when they occurred before (prompt lookup).

Needs no training and no model; pays where completions repeat their prompt or themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_engine.config import SamplingConfig
from grpo_engine.rollout.drafting import Drafts

NOTHING = -1
"""Fills unused places; equals no token."""
ROOM_TOKENS = 256
"""Tokens by which the buffer grows, at least."""


class NgramDrafter:
    """Implements `drafting.Drafter`.

    Of the earlier places where the row's last n tokens occur, max_match >= n >= min_match, the longest match counts,
    and among equals the latest. Its continuation is drafted with certainty; where it reaches the row's end it goes on
    from its own beginning, so that a row in a loop gets a draft of full length.
    """

    samples = False

    def __init__(self, min_match: int, max_match: int, max_tokens: int, device: torch.device) -> None:
        self.max_tokens = max_tokens
        self._min_match, self._max_match = min_match, max_match
        self._tokens_BT = torch.empty((0, 0), dtype=torch.int32, device=device)
        self._lengths_B = torch.empty(0, dtype=torch.long, device=device)
        self._longest = 0
        """No row has more tokens; exact after `_make_room` had to look."""

    # ------------------------------------------------------------ rows
    def admit(self, prompts: Sequence[Sequence[int]], first_tokens_B: Tensor, hidden_BH: Tensor) -> None:
        """New rows at the end, their tokens the prompt and the first token."""
        old, new = len(self._lengths_B), len(prompts)
        device = self._tokens_BT.device
        lengths = [len(prompt) for prompt in prompts]
        lengths_B = torch.tensor(lengths, dtype=torch.long, device=device)
        width = max(lengths)
        self._make_room(1, width)
        padded = [[*prompt, *[NOTHING] * (width - len(prompt))] for prompt in prompts]
        tokens_BT = self._tokens_BT.new_full((new, self._tokens_BT.shape[1]), NOTHING)
        tokens_BT[:, :width] = torch.tensor(padded, dtype=torch.int32, device=device)
        tokens_BT[torch.arange(new, device=device), lengths_B] = first_tokens_B.to(torch.int32)
        self._tokens_BT = torch.cat([self._tokens_BT, tokens_BT]) if old else tokens_BT
        self._lengths_B = torch.cat([self._lengths_B, lengths_B + 1])
        self._longest = max(self._longest, width + 1)

    def select(self, rows: Tensor) -> None:
        """Go on with these rows only, in this order."""
        self._tokens_BT, self._lengths_B = self._tokens_BT[rows], self._lengths_B[rows]

    def confirm(self, tokens_BQ: Tensor, count_B: Tensor, hidden_BQH: Tensor) -> None:
        """Append count_B[b] tokens to row b."""
        num_tokens = tokens_BQ.shape[1]
        self._make_room(num_tokens)
        offset_Q = torch.arange(num_tokens, device=tokens_BQ.device)
        gained_BQ = torch.where(offset_Q < count_B[:, None], tokens_BQ, NOTHING).to(torch.int32)
        self._tokens_BT.scatter_(1, self._lengths_B[:, None] + offset_Q, gained_BQ)
        self._lengths_B = self._lengths_B + count_B
        self._longest += num_tokens

    def _make_room(self, num_tokens: int, new_length: int = 0) -> None:
        """Let every row, and one of `new_length`, take so many tokens more."""
        rows, capacity = self._tokens_BT.shape
        if max(self._longest, new_length) + num_tokens <= capacity:
            return
        self._longest = int(self._lengths_B.max()) if rows else 0
        needed = max(self._longest, new_length) + num_tokens
        if needed > capacity:
            grown = self._tokens_BT.new_full((rows, needed + max(ROOM_TOKENS, needed // 4)), NOTHING)
            grown[:, :capacity] = self._tokens_BT
            self._tokens_BT = grown

    # ------------------------------------------------------------ drafts
    def propose(self, num_tokens: int, sampling: SamplingConfig, uniforms_BK: Tensor | None) -> Drafts:
        """The continuation of the best match; rows without one get a draft of length 0."""
        place_B, matched_B = self._lookup()
        last_B = self._lengths_B - 1
        period_B = (last_B - place_B).clamp(min=1)
        offset_K = torch.arange(num_tokens, device=last_B.device)
        source_BK = (place_B + 1)[:, None] + offset_K % period_B[:, None]
        tokens_BK = self._tokens_BT.gather(1, source_BK).clamp(min=0).long()
        return Drafts(tokens_BK, matched_B * num_tokens, None)

    def _lookup(self) -> tuple[Tensor, Tensor]:
        """(int64 [B] last token of the best earlier occurrence, bool [B] whether there is one)."""
        longest = int(self._lengths_B.max())
        tokens_BT = self._tokens_BT[:, :longest]
        last_B1 = self._lengths_B[:, None] - 1
        place_T = torch.arange(longest, device=tokens_BT.device)
        running_BT = place_T < last_B1
        matches_BT = torch.zeros_like(tokens_BT)
        for back in range(min(self._max_match, longest)):
            wanted_B1 = tokens_BT.gather(1, (last_B1 - back).clamp(min=0))
            running_BT[:, :back] = False  # and so wherever a row has not so many tokens
            running_BT[:, back:] &= tokens_BT[:, : longest - back] == wanted_B1
            matches_BT += running_BT
        score_BT = torch.where(matches_BT >= self._min_match, matches_BT.long() * longest + place_T, NOTHING)
        best_B, place_B = score_BT.max(dim=1)
        return place_B, best_B > NOTHING
