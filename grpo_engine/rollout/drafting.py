"""The seam between decoding and speculation.

Every row has one pending token: chosen, not yet fed. A step of K drafts is

    drafter.propose(K) ──► rows.feed([pending, d_1 … d_K]) ──► logits of K + 1 positions ──► verification
                                                                                              │
    drafter.confirm ◄── rows.keep(1 + accepted) ◄── accepted drafts and one token more ◄──────┘

and with K = 0 it is plain decoding. The tokens of a row that were kept are exactly those in its cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from grpo_engine.config import SamplingConfig


@dataclass(frozen=True, slots=True)
class Drafts:
    """K drafted tokens a row."""

    tokens_BK: Tensor
    """int64."""
    lengths_B: Tensor
    """int64, 0 … K: how many of them are meant; the rest is padding and is never accepted."""
    logprobs_BKV: Tensor | None
    """float32, the distribution each was sampled from; None: drafted with certainty (n-gram, greedy)."""


class Drafter(Protocol):
    """Guesses the next tokens of every row. Its rows follow the decoder's, in the same order."""

    max_tokens: int
    """Longest draft it can give."""
    samples: bool
    """Whether it samples where it gets numbers, and then gives the log-probabilities it sampled from; otherwise every
    draft is made with certainty."""

    def admit(self, prompts: Sequence[Sequence[int]], first_tokens_B: Tensor, hidden_BH: Tensor) -> None:
        """New rows at the end: their prompts, the first token of each (now pending) and the hidden state [B, H] that
        predicted it (empty, shape [0], where the model gives none)."""
        ...

    def select(self, rows: Tensor) -> None:
        """Go on with these rows only, in this order."""
        ...

    def confirm(self, tokens_BQ: Tensor, count_B: Tensor, hidden_BQH: Tensor) -> None:
        """After a step, drafted or not: row b gained tokens_BQ[b, :count_B[b]], the last of which is pending now.
        hidden_BQH[b, i] is the hidden state that predicted tokens_BQ[b, i]. A row with count 0 has ended and waits to
        be dropped."""
        ...

    def propose(self, num_tokens: int, sampling: SamplingConfig, uniforms_BK: Tensor | None) -> Drafts:
        """Drafts that follow each row's pending token; greedy where `uniforms_BK` (float64) is None."""
        ...
