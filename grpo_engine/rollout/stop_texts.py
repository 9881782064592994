"""Stop texts found while tokens come: which token completes one.

Only the end of a completion is decoded, as far back as the longest text reaches. A text counts as soon as the decoded
completion holds it, whatever tokens it is made of.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerFast

MARGIN = 8
"""Characters more than the longest text: what decoding from the middle may show differently (a stripped space, a
character cut in two) lies among them."""

Integers = npt.NDArray[np.int64]


class StopTexts:
    """Looks for `texts` in the completions of requests, which are known by a number."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._texts = list(texts)
        self._reach = max(map(len, texts)) + MARGIN
        self._tails: dict[int, list[int]] = {}
        """The last tokens of each completion."""

    def cut(
        self, requests_B: Integers, counts_B: Integers, tokens_BQ: Integers
    ) -> tuple[Integers, npt.NDArray[np.bool_]]:
        """Of tokens_BQ[b, :counts_B[b]], which completions gained, how many belong to them, and whether a stop text
        ends them."""
        counts, ended = counts_B.copy(), np.zeros(len(counts_B), dtype=np.bool_)
        for row in counts_B.nonzero()[0].tolist():
            tokens = tokens_BQ[row, : counts_B[row]].tolist()
            counts[row], ended[row] = self._count(int(requests_B[row]), tokens)
        return counts, ended

    def _count(self, request: int, tokens: Sequence[int]) -> tuple[int, bool]:
        tail = self._tails.setdefault(request, [])
        for number, token in enumerate(tokens, start=1):
            tail.append(token)
            if self._found(tail):
                del self._tails[request]
                return number, True
        self._shorten(tail)
        return len(tokens), False

    def _found(self, tail: Sequence[int]) -> bool:
        text = self._decode(tail)
        return any(stop in text for stop in self._texts)

    def _shorten(self, tail: list[int]) -> None:
        """Drop the first half of the tokens as long as the rest reaches far enough."""
        while len(tail) > 2 * self._reach and len(self._decode(tail[len(tail) // 2 :])) >= self._reach:
            del tail[: len(tail) // 2]

    def _decode(self, tokens: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)
