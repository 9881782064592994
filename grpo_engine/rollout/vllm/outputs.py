"""From what vLLM returned, in process or by HTTP, to completions. Needs no vLLM.

Beside each token vLLM returns entries (token id, value). Ours (`widening`) are, under truncated sampling: the
sampled token; every token that truncation kept; one entry that stands for no token and says how much probability the
kept ones had before. Its value is 1 - ln(kept mass), above 0.5, where log-probabilities never are. Hence

    full log-probability = truncated log-probability + ln(kept mass).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from grpo_engine.errors import NonFinite
from grpo_engine.types import Completion, FinishReason

MASS_OFFSET = 1.0
MASS_ABOVE = 0.5
"""Values above are the kept mass."""
IMPOSSIBLE = -9000.0
"""Values below are of tokens that truncation removed; servers write -9999 for minus infinity."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One request's tokens and what belongs to each of them; all lists have length T."""

    token_ids: list[int]
    logprobs: list[float]
    full_logprobs: list[float]
    kept_ids: list[list[int]] | None
    """[T][kept] ascending; None without truncation."""
    finish: str | None
    """vLLM's word: stop, length, abort …"""


def read_untruncated(token_ids: list[int], logprobs: list[float], finish: str | None) -> Sampled:
    """`logprobs` [T] of the sampled tokens; the full distribution was sampled from."""
    return Sampled(token_ids, logprobs, logprobs, None, finish)


def read_truncated(
    token_ids: list[int], entries: Sequence[tuple[Sequence[int], Sequence[float]]], finish: str | None
) -> Sampled:
    """`entries` [T]: (ids, values) beside each token, in any order. Raises NonFinite when a token's own is absent."""
    logprobs: list[float] = []
    full_logprobs: list[float] = []
    kept_ids: list[list[int]] = []
    for token, (ids, values) in zip(token_ids, entries, strict=True):
        kept = {index: value for index, value in zip(ids, values, strict=True) if IMPOSSIBLE < value <= MASS_ABOVE}
        if token not in kept:
            raise NonFinite(f"vLLM returned no finite log-probability of the token {token} that it sampled")
        log_mass = min((MASS_OFFSET - value for value in values if value > MASS_ABOVE), default=0.0)
        logprobs.append(kept[token])
        full_logprobs.append(kept[token] + log_mass)
        kept_ids.append(sorted(kept))
    return Sampled(token_ids, logprobs, full_logprobs, kept_ids, finish)


class Completions:
    """Makes completions of sampled tokens; remembers each token's text."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, end_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._end_token_ids = frozenset(end_token_ids)
        self._token_texts: dict[int, str] = {}

    def make(self, sampled: Sampled, stop: Sequence[str], policy_version: int) -> Completion:
        """The completion, cut behind the first token that ends it. Raises NonFinite for a log-probability that is none.

        vLLM looks for stop texts and end tokens once a step, and a step of speculation adds several tokens."""
        if not all(map(math.isfinite, sampled.logprobs)):
            raise NonFinite("vLLM's log-probabilities are not finite; lower the learning rate or check the model")
        length, reason = self._end(sampled, stop)
        tokens = sampled.token_ids[:length]
        ended = bool(tokens) and tokens[-1] in self._end_token_ids
        return Completion(
            token_ids=tokens,
            text=self.text(tokens[:-1] if ended else tokens),
            finish_reason=reason,
            logprobs=sampled.logprobs[:length],
            full_logprobs=sampled.full_logprobs[:length],
            token_texts=[self._token_text(token) for token in tokens],
            kept_ids=None if sampled.kept_ids is None else sampled.kept_ids[:length],
            policy_version=policy_version,
        )

    def text(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    def _end(self, sampled: Sampled, stop: Sequence[str]) -> tuple[int, FinishReason]:
        tokens = sampled.token_ids
        length = next((i + 1 for i, token in enumerate(tokens) if token in self._end_token_ids), len(tokens))
        stopped = sampled.finish == "stop"
        if stop and any(text in self.text(tokens[:length]) for text in stop):
            length, stopped = self._stop_length(tokens[:length], stop), True
        if stopped or (length > 0 and tokens[length - 1] in self._end_token_ids):
            return length, "stop"
        return length, "length" if sampled.finish == "length" else "aborted"

    def _stop_length(self, tokens: list[int], stop: Sequence[str]) -> int:
        """Length of the shortest beginning whose text holds a stop text; the whole does."""
        low, high = 1, len(tokens)
        while low < high:
            middle = (low + high) // 2
            text = self.text(tokens[:middle])
            low, high = (low, middle) if any(part in text for part in stop) else (middle + 1, high)
        return low

    def _token_text(self, token: int) -> str:
        if token not in self._token_texts:
            self._token_texts[token] = self.text([token])
        return self._token_texts[token]
