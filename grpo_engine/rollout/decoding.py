"""The decoding loop: rows start as places become free, gain tokens together, and leave when they end.

    waiting ──► admit: prefill, first token ──► step: feed pending tokens (and drafts), choose ──► record
                  ▲                               │
                  └── places of ended rows ◄── drop rows that ended, set stragglers aside

Nothing here depends on time: shapes and order follow from requests, weights and draft lengths alone, so the same call
gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from grpo_engine.config import SamplingConfig
from grpo_engine.rollout.choice import choose
from grpo_engine.rollout.record import Record
from grpo_engine.rollout.rows import Rows
from grpo_engine.rollout.speculation import Pending, Speculator
from grpo_engine.rollout.stop_texts import StopTexts
from grpo_engine.rollout.verification import Verified, one_token
from grpo_engine.rollout.waiting import Entry, Waiting
from grpo_engine.streams import uniforms
from grpo_engine.types import SampleRequest

REFILL_SHARE = 0.125
"""Share of the places that must be free before waiting prompts are prefilled: a few together cost little more than one
alone."""
DROP_SHARE = 0.125
"""Share of the rows that must have ended before they are dropped: dropping copies the others' cache."""

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Limits:
    """What ends a completion and bounds a batch."""

    max_rows: int
    max_context_tokens: int
    is_end_V: npt.NDArray[np.bool_]
    """By token id: ends a completion."""
    straggler_tokens: int | None
    """A completion longer than this waits until all others have started; None = never."""


class Decoding:
    """One call of a sampler. `run` once; then `record`, and the counters for metrics."""

    def __init__(
        self, rows: Rows, requests: Sequence[SampleRequest], sampling: SamplingConfig, limits: Limits,
        waiting: Waiting, stop_texts: StopTexts | None, device: torch.device, speculator: Speculator | None = None,
    ) -> None:  # fmt: skip
        self.record = Record(len(requests), truncated=sampling.truncated)
        self.stopped_N = np.zeros(len(requests), dtype=np.bool_)
        """Ended by an end token or a stop text."""
        self.num_stragglers = 0
        self.num_row_steps = 0
        """Rows fed, over all steps; `num_live_steps` of them went on."""
        self.num_live_steps = 0
        self._rows, self._requests, self._sampling, self._limits = rows, requests, sampling, limits
        self._waiting, self._stop_texts, self._device, self._speculator = waiting, stop_texts, device, speculator
        self._prompt_N = np.array([len(request.prompt_ids) for request in requests], dtype=np.int64)
        self._budget_N = np.minimum(limits.max_context_tokens - self._prompt_N, sampling.max_new_tokens)
        self._numbers_NT = np.zeros((len(requests), int(self._budget_N.max(initial=1))))
        # Of the rows in the batch:
        self._request_B = np.zeros(0, dtype=np.int64)
        self._place_B = np.zeros(0, dtype=np.int64)
        """Tokens that the completion has."""
        self._live_B = np.zeros(0, dtype=np.bool_)
        self._pending_B = torch.zeros(0, dtype=torch.long, device=device)

    def run(self) -> None:
        """Sample every request to its end."""
        if self._speculator is not None:
            self._speculator.reset()
        while True:
            self._admit()
            if not self._live_B.any():
                return
            self._step()
            self._set_stragglers_aside()
            if self._live_B.sum() <= (1 - DROP_SHARE) * len(self._live_B):
                self._drop()

    # ------------------------------------------------------------ rows come and go
    def _admit(self) -> None:
        while self._waiting.num_rows:
            live = int(self._live_B.sum())
            least = max(1, int(REFILL_SHARE * self._limits.max_rows)) if live else 1
            entries = self._waiting.take(self._limits.max_rows - live, least)
            if not entries:
                return
            self._drop()
            self._start(entries)
            if self._live_B.any():
                return

    def _start(self, entries: Sequence[Entry]) -> None:
        outputs = self._rows.admit([e.token_ids for e in entries], [len(e.requests) for e in entries])
        started = [(request, entry) for entry in entries for request in entry.requests]
        new = np.array([request for request, _ in started], dtype=np.int64)
        place = np.array([entry.place for _, entry in started], dtype=np.int64)
        self._draw_numbers(new)
        choice = choose(outputs.logits_BQV[:, 0], self._sampling, self._numbers(new, place, 1))
        if self._speculator is not None:
            sources = [replace(self._requests[n], prompt_ids=list(entry.token_ids)) for n, entry in started]
            hidden = None if outputs.hidden_BQH is None else outputs.hidden_BQH[:, 0]
            self._speculator.admit(sources, choice.tokens_B, hidden, self._sampling.max_new_tokens)
        first = len(self._live_B)
        self._request_B = np.concatenate([self._request_B, new])
        self._place_B = np.concatenate([self._place_B, place])
        self._live_B = np.concatenate([self._live_B, np.ones(len(new), dtype=np.bool_)])
        self._pending_B = torch.cat([self._pending_B, choice.tokens_B])
        counts = np.ones(len(new), dtype=np.int64)
        self._gain(first, counts, one_token(choice, torch.ones_like(choice.tokens_B)))

    def _set_stragglers_aside(self) -> None:
        longest = self._limits.straggler_tokens
        if longest is None or not self._waiting.num_fresh:
            return
        for row in (self._live_B & (self._place_B > longest)).nonzero()[0].tolist():
            request = int(self._request_B[row])
            tokens = [*self._requests[request].prompt_ids, *self.record.tokens_of(request)]
            self._waiting.set_aside(tokens, request, int(self._place_B[row]))
            self._live_B[row] = False
            self.num_stragglers += 1

    def _drop(self) -> None:
        """Forget the rows that ended."""
        if self._live_B.all():
            return
        rows = torch.from_numpy(self._live_B.nonzero()[0])
        self._rows.select(rows)
        if self._speculator is not None:
            self._speculator.select(rows)
        self._pending_B = self._pending_B.index_select(0, rows.to(self._device))
        live = self._live_B
        self._request_B, self._place_B, self._live_B = self._request_B[live], self._place_B[live], live[live]

    # ------------------------------------------------------------ tokens
    def _step(self) -> None:
        self.num_row_steps += len(self._live_B)
        self.num_live_steps += int(self._live_B.sum())
        if self._speculator is None:
            self._plain_step()
        else:
            self._drafted_step(self._speculator)

    def _plain_step(self) -> None:
        outputs = self._rows.feed(self._pending_B[:, None])
        choice = choose(outputs.logits_BQV[:, 0], self._sampling, self._numbers(self._request_B, self._place_B, 1))
        counts_B = self._live_B.astype(np.int64)
        gained = one_token(choice, torch.from_numpy(counts_B))
        self._rows.keep(gained.counts_B)
        self._pending_B = choice.tokens_B
        self._gain(0, counts_B, gained)

    def _drafted_step(self, speculator: Speculator) -> None:
        longest = int((self._prompt_N[self._request_B] + self._place_B).max())
        length = speculator.choose_length(len(self._live_B), longest)
        remaining_B = np.where(self._live_B, self._budget_N[self._request_B] - self._place_B, 0)
        numbers = self._numbers(self._request_B, self._place_B, length + 1)
        pending = Pending(
            self._pending_B, self._tensor(self._place_B), self._tensor(remaining_B),
            None if numbers is None else numbers.view(-1, length + 1),
        )  # fmt: skip
        gained = speculator.step(self._rows, length, pending, self._sampling)
        self._pending_B = gained.last_B()
        self._gain(0, gained.counts_B.cpu().numpy(), gained)

    def _gain(self, first: int, counts_B: Integers, gained: Verified) -> None:
        """Write down what the rows from `first` on gained, and which of them ended by it."""
        requests, places = self._request_B[first:], self._place_B[first:]
        tokens_BQ = gained.tokens_BQ.cpu().numpy()
        ended_B = np.zeros(len(requests), dtype=np.bool_)
        if self._stop_texts is not None:
            counts_B, ended_B = self._stop_texts.cut(requests, counts_B, tokens_BQ)
        self.record.write(
            requests, places, counts_B, tokens_BQ, gained.logprobs_BQ, gained.full_logprobs_BQ, gained.kept_BQV
        )
        places += counts_B  # a view: the rows' own counts
        last_B = tokens_BQ[np.arange(len(requests)), np.maximum(counts_B - 1, 0)]
        ended_B |= (counts_B > 0) & self._limits.is_end_V[last_B]
        self.stopped_N[requests[ended_B]] = True
        self._live_B[first:] &= ~(ended_B | (places >= self._budget_N[requests]))

    def _draw_numbers(self, requests: Integers) -> None:
        if self._sampling.temperature > 0:
            for request in requests.tolist():
                budget = int(self._budget_N[request])
                self._numbers_NT[request, :budget] = uniforms(budget, "sample", *self._requests[request].stream)

    def _numbers(self, requests_B: Integers, places_B: Integers, count: int) -> Tensor | None:
        """[B x count] float64 of the streams `sample`, row after row, from each row's place on; None = greedy."""
        if self._sampling.temperature == 0:
            return None
        # Numbers behind a row's budget choose nothing that is kept.
        places_BQ = np.minimum(places_B[:, None] + np.arange(count), self._numbers_NT.shape[1] - 1)
        return self._tensor(self._numbers_NT[requests_B[:, None], places_BQ].ravel())

    def _tensor(self, values: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)
