"""A policy whose next token depends on the last one alone, so that whole completions have exact probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grpo_engine.config import SamplingConfig
from grpo_engine.model.truncation import kept_mask
from grpo_engine.rollout.drafting import Drafts
from grpo_engine.rollout.forward import Outputs
from grpo_engine.rollout.speculation import Pending, Speculator
from grpo_engine.rollout.verification import Verified
from grpo_engine.streams import uniforms
from grpo_engine.types import SampleRequest

NO_ENDS = torch.empty(0, dtype=torch.long)


def table(size: int, seed: int, spread: float = 1.5) -> Tensor:
    """[V, V] logits of the next token, by the last one."""
    return torch.randn(size, size, generator=torch.Generator().manual_seed(seed)) * spread


def distribution(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """[..., V] float64: what plain decoding samples from."""
    scaled = (logits / sampling.temperature).flatten(0, -2)
    kept = kept_mask(scaled, sampling.top_k, sampling.top_p, sampling.min_p)
    return scaled.double().masked_fill(~kept, float("-inf")).softmax(-1).view(logits.shape)


class MarkovRows:
    """Implements rows.Rows; the hidden state is the token that was fed."""

    def __init__(self, logits_VV: Tensor, num_rows: int) -> None:
        self.logits_VV = logits_VV
        self.held: list[list[int]] = [[] for _ in range(num_rows)]
        self.fed: list[list[int]] = []

    @property
    def num_rows(self) -> int:
        return len(self.held)

    def admit(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> Outputs:
        raise NotImplementedError

    def feed(self, tokens_BQ: Tensor) -> Outputs:
        self.fed = tokens_BQ.tolist()
        return Outputs(self.logits_VV[tokens_BQ], tokens_BQ[..., None].float())

    def keep(self, count_B: Tensor) -> None:
        for row, fed, count in zip(self.held, self.fed, count_B.tolist(), strict=True):
            row.extend(fed[:count])

    def select(self, rows: Tensor) -> None:
        self.held = [self.held[row] for row in rows.tolist()]


class MarkovDrafter:
    """Drafts from a table of its own, sampled or certain; remembers what each row's pending token is."""

    max_tokens = 16

    def __init__(self, logits_VV: Tensor, *, samples: bool = True) -> None:
        self.samples = samples
        self._logits_VV = logits_VV
        self.rows: list[list[int]] = []
        self.num_proposals = 0

    def admit(self, prompts: Sequence[Sequence[int]], first_tokens_B: Tensor, hidden_BH: Tensor) -> None:
        self.rows += [[first] for first in first_tokens_B.tolist()]

    def select(self, rows: Tensor) -> None:
        self.rows = [self.rows[row] for row in rows.tolist()]

    def confirm(self, tokens_BQ: Tensor, count_B: Tensor, hidden_BQH: Tensor) -> None:
        for row, tokens, count in zip(self.rows, tokens_BQ.tolist(), count_B.tolist(), strict=True):
            row.extend(tokens[:count])

    def propose(self, num_tokens: int, sampling: SamplingConfig, uniforms_BK: Tensor | None) -> Drafts:
        self.num_proposals += 1
        last_B = torch.tensor([row[-1] for row in self.rows])
        tokens, logprobs = [], []
        for depth in range(num_tokens):
            logits_BV = self._logits_VV[last_B]
            last_B = logits_BV.argmax(-1)
            if uniforms_BK is not None:
                drafted_BV = distribution(logits_BV, sampling)
                last_B = (
                    (drafted_BV.cumsum(-1) < uniforms_BK[:, depth, None]).sum(-1).clamp(max=logits_BV.shape[-1] - 1)
                )
                logprobs.append(drafted_BV.log().float())
            tokens.append(last_B)
        lengths_B = torch.full_like(last_B, num_tokens)
        return Drafts(torch.stack(tokens, 1), lengths_B, torch.stack(logprobs, 1) if logprobs else None)


def requests(count: int, prompt: Sequence[int] = (0,), seed: int = 1) -> list[SampleRequest]:
    return [SampleRequest(list(prompt), (seed, row), "0") for row in range(count)]


def sample_numbers(asked: Sequence[SampleRequest], count: int) -> Tensor:
    """[B, count] of the streams `sample`."""
    return torch.from_numpy(np.stack([_sample_numbers(count, request.stream) for request in asked]))


@cache
def _sample_numbers(count: int, stream: tuple[int, ...]) -> NDArray[np.float64]:
    """Thousands of rows are the same in several tests."""
    return uniforms(count, "sample", *stream)


def decode(
    speculator: Speculator, logits_VV: Tensor, asked: Sequence[SampleRequest], sampling: SamplingConfig,
    lengths: Sequence[int] | None = None,
) -> tuple[list[list[int]], list[Verified]]:  # fmt: skip
    """(each row's tokens after the pending 0, every step); `lengths` replaces the speculator's choice, in turn."""
    budget, count = sampling.max_new_tokens, len(asked)
    numbers_BT = None if sampling.temperature == 0 else sample_numbers(asked, budget + 17)
    rows, steps = MarkovRows(logits_VV, count), list[Verified]()
    pending_B = torch.zeros(count, dtype=torch.long)
    position_B, remaining_B = torch.ones_like(pending_B), torch.full_like(pending_B, budget - 1)
    speculator.reset()
    speculator.admit(asked, pending_B, torch.zeros(count, 1), budget)
    tokens: list[list[int]] = [[] for _ in asked]
    while bool((remaining_B > 0).any()):
        longest = 1 + int(position_B.max())
        length = speculator.choose_length(count, longest) if lengths is None else lengths[len(steps) % len(lengths)]
        place_BQ = position_B[:, None] + torch.arange(length + 1)
        sample_BQ = None if numbers_BT is None else numbers_BT.gather(1, place_BQ)
        gained = speculator.step(rows, length, Pending(pending_B, position_B, remaining_B, sample_BQ), sampling)
        for row, new, num in zip(tokens, gained.tokens_BQ.tolist(), gained.counts_B.tolist(), strict=True):
            row.extend(new[:num])
        position_B, remaining_B = position_B + gained.counts_B, remaining_B - gained.counts_B
        pending_B = torch.tensor([row[-1] for row in tokens])
        ended_B = torch.isin(pending_B, speculator.end_token_ids)
        remaining_B = remaining_B.masked_fill(ended_B, 0)
        steps.append(gained)
    assert rows.held == [[0, *row[:-1]] for row in tokens]
    return tokens, steps


def chain_probabilities(logits_VV: Tensor, sampling: SamplingConfig, length: int) -> dict[tuple[int, ...], float]:
    """Of every continuation of token 0 by `length` tokens."""
    step = distribution(logits_VV, sampling).tolist()
    found = {}
    for tokens in product(range(len(step)), repeat=length):
        probability, last = 1.0, 0
        for token in tokens:
            probability, last = probability * step[last][token], token
        found[tokens] = probability
    return found


def deviation(counts: Sequence[float], probabilities: Sequence[float]) -> float:
    """Chi-square of counts against exact probabilities, in standard deviations above its mean; cells with less than 5
    expected are joined into one."""
    observed = torch.tensor(counts, dtype=torch.float64)
    expected = torch.tensor(probabilities, dtype=torch.float64) * observed.sum()
    assert observed[expected == 0].sum() == 0, "something impossible was sampled"
    small = expected < 5
    observed = torch.cat([observed[~small], observed[small].sum()[None]])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    cells = expected > 0
    statistic = ((observed - expected)[cells] ** 2 / expected[cells]).sum().item()
    freedom = int(cells.sum()) - 1
    assert freedom >= 1
    return float((statistic - freedom) / (2 * freedom) ** 0.5)
