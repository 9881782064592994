"""What decoding wrote down, by request, while rows come and go.

Steps only append; log-probabilities stay on the device until everything is sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from grpo_engine.errors import NonFinite

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens of one request; all of length T."""

    token_ids: list[int]
    logprobs: list[float]
    full_logprobs: list[float]
    kept_ids: list[list[int]] | None
    """[T][kept]; None without truncation."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """Of the n tokens that a step wrote: all kept ids, and how many each token has."""

    ids: Integers
    sizes_n: Integers


class Record:
    """Tokens of N requests."""

    def __init__(self, num_requests: int, *, truncated: bool) -> None:
        self._num_requests = num_requests
        self._truncated = truncated
        self._requests: list[Integers] = []
        self._places: list[Integers] = []
        self._tokens: list[Integers] = []
        self._valid: list[npt.NDArray[np.bool_]] = []
        self._logprobs: list[Tensor] = []
        self._kept: list[_Kept] = []

    def write(
        self, requests_B: Integers, places_B: Integers, counts_B: Integers, tokens_BQ: Integers,
        logprobs_BQ: Tensor, full_logprobs_BQ: Tensor, kept_BQV: Tensor | None,
    ) -> None:  # fmt: skip
        """Row b gained tokens_BQ[b, :counts_B[b]], which begin at place places_B[b] of its request's completion."""
        num_tokens = tokens_BQ.shape[1]
        column_Q = np.arange(num_tokens)
        valid = (column_Q < counts_B[:, None]).ravel()
        self._requests.append(requests_B.repeat(num_tokens)[valid])
        self._places.append((places_B[:, None] + column_Q).ravel()[valid])
        self._tokens.append(tokens_BQ.ravel()[valid])
        self._valid.append(valid)
        self._logprobs.append(torch.stack([logprobs_BQ, full_logprobs_BQ]).flatten(1))
        if self._truncated and kept_BQV is not None:
            self._kept.append(_kept(kept_BQV.flatten(0, 1), valid))

    def tokens_of(self, request: int) -> list[int]:
        """What one request has so far."""
        parts = [t[r == request] for r, t in zip(self._requests, self._tokens, strict=True)]
        return [int(token) for part in parts for token in part]

    def finish(self) -> list[Sampled]:
        """One entry a request. Raises NonFinite when a token has a log-probability that is not a number."""
        if not self._requests:
            return [Sampled([], [], [], [] if self._truncated else None) for _ in range(self._num_requests)]
        requests, places, tokens = map(np.concatenate, (self._requests, self._places, self._tokens))
        logprobs = torch.cat(self._logprobs, dim=1).cpu().numpy()[:, np.concatenate(self._valid)]
        if not np.isfinite(logprobs).all():
            raise NonFinite(
                "the model's logits are not finite while sampling; lower the learning rate or check the model"
            )
        order = np.lexsort((places, requests))
        ends = np.bincount(requests, minlength=self._num_requests).cumsum()
        token_ids, sampled, full = (values[order].tolist() for values in (tokens, logprobs[0], logprobs[1]))
        kept = self._kept_lists(order)
        starts = [0, *ends[:-1].tolist()]
        return [
            Sampled(
                token_ids[start:end], sampled[start:end], full[start:end], None if kept is None else kept[start:end]
            )
            for start, end in zip(starts, ends.tolist(), strict=True)
        ]

    def _kept_lists(self, order: Integers) -> list[list[int]] | None:
        if not self._truncated:
            return None
        ids = np.concatenate([part.ids for part in self._kept]).tolist()
        sizes = np.concatenate([part.sizes_n for part in self._kept])
        ends = sizes.cumsum()
        return [ids[start:end] for start, end in zip((ends - sizes)[order].tolist(), ends[order].tolist(), strict=True)]


def _kept(kept_MV: Tensor, valid_M: npt.NDArray[np.bool_]) -> _Kept:
    rows = torch.from_numpy(valid_M.nonzero()[0]).to(kept_MV.device)
    kept_nV = kept_MV if len(rows) == len(kept_MV) else kept_MV.index_select(0, rows)
    token, ids = kept_nV.nonzero().cpu().numpy().T
    return _Kept(np.ascontiguousarray(ids), np.bincount(token, minlength=len(rows)))
