"""One decoding step with drafts: draft, verify in one forward, keep what was accepted, learn from it.

Every step goes through here once drafts are configured, also those without a draft: the drafter follows each token
(its cache stays right), and what plain decoding costs stays known. Time and acceptance are learned for as long as the
speculator lives, over all calls of a sampler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from grpo_engine.config import SamplingConfig
from grpo_engine.config_rollout import DraftsConfig, NgramDrafts, NoDrafts
from grpo_engine.rollout.choice import choose
from grpo_engine.rollout.draft_length import DraftLength, draft_lengths
from grpo_engine.rollout.drafting import Drafter, Drafts
from grpo_engine.rollout.ngram import NgramDrafter
from grpo_engine.rollout.rows import Rows
from grpo_engine.rollout.speculation_metrics import SpeculationMetrics
from grpo_engine.rollout.verification import Verified, cut, one_token, verify
from grpo_engine.streams import uniforms
from grpo_engine.types import SampleRequest


@dataclass(frozen=True, slots=True)
class Pending:
    """Where B rows stand before a step."""

    tokens_B: Tensor
    """int64, chosen and not yet fed."""
    positions_B: Tensor
    """int64: place in the completion of the next token, which is how many a row has, the pending one included."""
    remaining_B: Tensor
    """int64: tokens a row may still gain; 0 = it has ended and waits to be dropped."""
    sample_BQ: Tensor | None
    """float64 in [0, 1): numbers of the streams `sample` for the places positions_B, positions_B + 1, ..., one more
    than drafts; None = greedy."""


class Speculator:
    """Steps of rows whose next tokens `drafter` guesses. Its rows follow the decoding loop's, in the same order.

    Numbers that sample drafts and decide on them come from the request's streams `draft` and `accept`, by the token's
    place in the completion, so that no other number moves with the length of a draft.
    """

    def __init__(
        self, drafter: Drafter, lengths: Sequence[int], end_token_ids: Tensor,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        """`lengths` are those to choose from (`draft_length.draft_lengths`); `end_token_ids` int64, on the device."""
        self._drafter = drafter
        self._lengths = DraftLength(lengths)
        self.end_token_ids = end_token_ids
        self._clock = clock
        self._metrics = SpeculationMetrics()
        self.numbers = Numbers(end_token_ids.device)

    # ------------------------------------------------------------ rows
    def reset(self) -> None:
        """Forget all rows: before the first ones of a call, and so also after a call that failed."""
        self._drafter.select(torch.empty(0, dtype=torch.long, device=self.end_token_ids.device))
        self.numbers.clear()

    def admit(
        self, requests: Sequence[SampleRequest], first_tokens_B: Tensor, hidden_BH: Tensor | None, max_new_tokens: int
    ) -> None:
        """New rows at the end: `prompt_ids` are the tokens in the cache (of a completion that goes on, its own among
        them), then comes a row's first token, which is pending, with the hidden state that predicted it."""
        prompts = [request.prompt_ids for request in requests]
        self._drafter.admit(prompts, first_tokens_B, _or_empty(hidden_BH, first_tokens_B))
        if self._drafter.samples:
            self.numbers.admit(requests, max_new_tokens)

    def select(self, rows: Tensor) -> None:
        """Go on with these rows only, in this order (int64, on the host)."""
        self._drafter.select(rows.to(self.end_token_ids.device))
        if self._drafter.samples:
            self.numbers.select(rows)

    # ------------------------------------------------------------ steps
    def choose_length(self, num_rows: int, num_tokens: int) -> int:
        """Drafts of the next step of `num_rows`, the longest of which has `num_tokens`; ask once a step."""
        return self._lengths.choose(num_rows, num_tokens)

    def step(self, rows: Rows, length: int, pending: Pending, sampling: SamplingConfig) -> Verified:
        """Feed each row's pending token and up to `length` drafts; `rows` then hold what was fed and kept.

        Of the tokens gained the first counts_B[b] are valid, 0 for a row that had ended; none follows an end token, and
        the last one is pending now. Log-probabilities and kept ids are the policy's.
        """
        started = self._clock()
        drafts = self._propose(length, pending, sampling)
        if drafts is None:
            outputs = rows.feed(pending.tokens_B[:, None])
            gained, told_3B = self._choose(outputs.logits_BQV[:, 0], pending, sampling)
        else:
            outputs = rows.feed(torch.cat([pending.tokens_B[:, None], drafts.tokens_BK], dim=1))
            gained, told_3B = self._verify(outputs.logits_BQV, drafts, pending, sampling)
        host_3B = told_3B.cpu()  # the one wait for the device
        rows.keep(host_3B[2])
        self._drafter.confirm(gained.tokens_BQ, gained.counts_B, _or_empty(outputs.hidden_BQH, pending.tokens_B))
        self._learn(length, 0 if drafts is None else drafts.tokens_BK.shape[1], host_3B, self._clock() - started)
        return gained

    def take_metrics(self) -> dict[str, float]:
        """`SpeculationMetrics.take`."""
        return self._metrics.take()

    def _propose(self, length: int, pending: Pending, sampling: SamplingConfig) -> Drafts | None:
        """None where no row has a draft."""
        if length == 0:
            return None
        greedy = pending.sample_BQ is None or not self._drafter.samples
        draft_BK = None if greedy else self.numbers.at("draft", pending.positions_B, length)
        drafts = self._drafter.propose(length, sampling, draft_BK)
        drafts = replace(drafts, lengths_B=torch.minimum(drafts.lengths_B, pending.remaining_B))
        return drafts if self._drafter.samples or bool(drafts.lengths_B.any()) else None

    def _choose(self, logits_BV: Tensor, pending: Pending, sampling: SamplingConfig) -> tuple[Verified, Tensor]:
        """What is gained without drafts; as `_verify`."""
        sample_B = None if pending.sample_BQ is None else pending.sample_BQ[:, 0]
        counts_B = pending.remaining_B.clamp(max=1)
        told_3B = functional.pad(counts_B[None], (0, 0, 2, 0))
        return one_token(choose(logits_BV, sampling, sample_B), counts_B), told_3B

    def _verify(
        self, logits_BQV: Tensor, drafts: Drafts, pending: Pending, sampling: SamplingConfig
    ) -> tuple[Verified, Tensor]:
        """(what is gained, int64 [3, B]: drafts meant, drafts accepted, tokens gained)."""
        accept_BK = None
        if drafts.logprobs_BKV is not None:
            accept_BK = self.numbers.at("accept", pending.positions_B, drafts.tokens_BK.shape[1])
        verified = verify(logits_BQV, drafts, sampling, pending.sample_BQ, accept_BK)
        counts_B = cut(verified, self.end_token_ids, pending.remaining_B)
        accepted_B = torch.minimum(verified.counts_B - 1, counts_B)
        return replace(verified, counts_B=counts_B), torch.stack([drafts.lengths_B, accepted_B, counts_B])

    def _learn(self, length: int, fed: int, host_3B: Tensor, seconds: float) -> None:
        """From the rows that had not ended; `length` was chosen, `fed` drafts a row were computed."""
        told = host_3B.numpy()
        drafted, accepted, gained = told[:, told[2] > 0]
        self._metrics.add(fed, drafted, accepted, gained, seconds, self._lengths.plain_seconds())
        reached = [len(accepted), *(int((accepted >= depth).sum()) for depth in range(1, length + 1))]
        self._lengths.observe(length, reached, seconds)


class Numbers:
    """float64 numbers [B, T] of the streams `draft` and `accept`, by a token's place in its completion; drawn when they
    are first asked for, since calls that never draft need none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.clear()

    def clear(self) -> None:
        self._requests: list[SampleRequest] = []
        self._num_tokens = 0
        self._parts: dict[str, Tensor] = {}

    def admit(self, requests: Sequence[SampleRequest], max_new_tokens: int) -> None:
        self._num_tokens = max_new_tokens
        self._requests += requests
        for name, numbers_BT in self._parts.items():
            self._parts[name] = torch.cat([numbers_BT, self._drawn(name, requests)])

    def select(self, rows: Tensor) -> None:
        """`rows` int64, on the host."""
        self._requests = [self._requests[row] for row in rows.tolist()]
        rows = rows.to(self._device)
        self._parts = {name: numbers_BT[rows] for name, numbers_BT in self._parts.items()}

    def at(self, name: str, positions_B: Tensor, count: int) -> Tensor:
        """[B, count] of the stream `name`, from each row's position on."""
        if name not in self._parts:
            self._parts[name] = self._drawn(name, self._requests)
        numbers_BT = self._parts[name]
        place_BK = positions_B[:, None] + torch.arange(count, device=self._device)
        # Places behind a row's budget are never kept; any number serves.
        return numbers_BT.gather(1, place_BK.clamp(max=numbers_BT.shape[1] - 1))

    def _drawn(self, name: str, requests: Sequence[SampleRequest]) -> Tensor:
        numbers = np.stack([uniforms(self._num_tokens, name, *request.stream) for request in requests])
        return torch.from_numpy(numbers).to(self._device)


def _or_empty(hidden: Tensor | None, tokens_B: Tensor) -> Tensor:
    return tokens_B.new_empty(0, dtype=torch.float32) if hidden is None else hidden


def make_speculator(
    drafts: DraftsConfig, end_token_ids: Tensor, heads: Drafter | None = None, *, deterministic: bool = False
) -> Speculator | None:
    """What the config asks for, None without drafts; `heads` is the drafter of kind mtp.

    `end_token_ids` int64 on the model's device. Deterministic runs never choose by time."""
    if isinstance(drafts, NoDrafts):
        return None
    drafter: Drafter | None = heads
    if isinstance(drafts, NgramDrafts):
        longest = max(drafts.max_tokens, drafts.fixed_tokens or 0)
        drafter = NgramDrafter(drafts.min_match, drafts.max_match, longest, end_token_ids.device)
    if drafter is None:
        raise ValueError("drafts of kind mtp need the policy's heads")
    lengths = draft_lengths(drafts, drafter.max_tokens, deterministic=deterministic)
    return Speculator(drafter, lengths, end_token_ids)
