"""Acceptance of drafts against the exact distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_engine.config import SamplingConfig
from grpo_engine.rollout import verification
from grpo_engine.rollout.choice import choose
from grpo_engine.rollout.drafting import Drafts
from grpo_engine.rollout.verification import Verified, cut, verify
from tests.unit.speculation_fakes import deviation, distribution, table

VOCABULARY = 7
FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 0.7, "top_k": 4},
    {"top_p": 0.8},
    {"min_p": 0.15, "temperature": 1.4},
    {"top_k": 5, "top_p": 0.9, "min_p": 0.05},
]
GENERATOR = torch.Generator().manual_seed(11)


def settings(**values: Any) -> SamplingConfig:
    return SamplingConfig.model_validate(values)


def numbers(*shape: int) -> Tensor:
    return torch.rand(shape, generator=GENERATOR, dtype=torch.float64)


def drawn(count: int, sampling: SamplingConfig, policy_V: Tensor, drafter_V: Tensor) -> Verified:
    """One draft a row, sampled from the drafter's own distribution."""
    drafted_V = distribution(drafter_V[None], settings())[0]
    tokens_B1 = torch.multinomial(drafted_V, count, replacement=True, generator=GENERATOR)[:, None]
    logprobs_BKV = drafted_V.log().float().expand(count, 1, -1)
    drafts = Drafts(tokens_B1, torch.ones(count, dtype=torch.long), logprobs_BKV)
    return verify(policy_V.expand(count, 2, -1), drafts, sampling, numbers(count, 2), numbers(count, 1))


def certain(tokens: list[list[int]], lengths: list[int]) -> Drafts:
    return Drafts(torch.tensor(tokens), torch.tensor(lengths), None)


# ---------------------------------------------------------------- sampled drafts
@pytest.mark.parametrize("filters", FILTERS)
def test_sampled_drafts_leave_the_distribution_exact(filters: dict[str, Any]) -> None:
    policy_V, drafter_V = table(VOCABULARY, 1)[0], table(VOCABULARY, 2)[0]
    sampling = settings(**filters)
    verified = drawn(40_000, sampling, policy_V, drafter_V)
    exact_V = distribution(policy_V[None], sampling)[0]
    observed_V = torch.bincount(verified.tokens_BQ[:, 0], minlength=VOCABULARY)
    assert deviation(observed_V.tolist(), exact_V.tolist()) < 5


@pytest.mark.parametrize("filters", FILTERS)
def test_a_draft_is_accepted_as_often_as_the_distributions_overlap(filters: dict[str, Any]) -> None:
    policy_V, drafter_V = table(VOCABULARY, 1)[0], table(VOCABULARY, 2)[0]
    sampling = settings(**filters)
    accepted = (drawn(40_000, sampling, policy_V, drafter_V).counts_B - 1).double().mean().item()
    policy, drafter = distribution(policy_V[None], sampling)[0], distribution(drafter_V[None], settings())[0]
    overlap = torch.minimum(policy, drafter).sum().item()
    assert accepted == pytest.approx(overlap, abs=5 * (overlap * (1 - overlap) / 40_000) ** 0.5)


@pytest.mark.parametrize("filters", FILTERS)
def test_the_token_after_an_accepted_draft_is_the_policys(filters: dict[str, Any]) -> None:
    policy_V, sampling = table(VOCABULARY, 1)[0], settings(**filters)
    verified = drawn(40_000, sampling, policy_V, table(VOCABULARY, 2)[0])
    observed_V = torch.bincount(verified.tokens_BQ[verified.counts_B == 2, 1], minlength=VOCABULARY)
    assert deviation(observed_V.tolist(), distribution(policy_V[None], sampling)[0].tolist()) < 5


def test_sampling_anew_from_the_policy_after_a_refusal_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the tests above can fail: the commonest mistake is many standard deviations away."""
    monkeypatch.setattr(verification, "_residual", lambda policy_BV, draft_BV: policy_BV)
    policy_V = table(VOCABULARY, 1)[0]
    observed_V = torch.bincount(drawn(40_000, settings(), policy_V, table(VOCABULARY, 2)[0]).tokens_BQ[:, 0])
    assert deviation(observed_V.tolist(), distribution(policy_V[None], settings())[0].tolist()) > 50


def test_a_drafter_that_equals_the_policy_is_always_accepted() -> None:
    policy_V = table(VOCABULARY, 1)[0]
    assert drawn(5_000, settings(), policy_V, policy_V).counts_B.tolist() == [2] * 5_000


def test_a_refusal_by_rounding_alone_samples_from_the_policy() -> None:
    """Where p = q nothing is left of p - q. The number 1 stands for one that rounding put above the ratio. In the
    second row something is left: all of it at token 2."""
    logprobs_V = torch.tensor([0.25, 0.5, 0.25]).log()
    drafted_BKV = torch.stack([logprobs_V, torch.tensor([0.4, 0.6, 1e-9]).log()])[:, None]
    drafts = Drafts(torch.zeros(2, 1, dtype=torch.long), torch.ones(2, dtype=torch.long), drafted_BKV)
    certain_BK = torch.ones(2, 1, dtype=torch.float64)
    verified = verify(logprobs_V.expand(2, 2, 3), drafts, settings(), torch.full((2, 2), 0.5).double(), certain_BK)
    assert (verified.counts_B.tolist(), verified.tokens_BQ[:, 0].tolist()) == ([1, 1], [1, 2])


def test_a_draft_that_truncation_removed_is_never_accepted() -> None:
    policy_BQV = torch.tensor([3.0, 2.0, 1.0]).expand(1, 2, 3)
    drafts = Drafts(torch.tensor([[2]]), torch.tensor([1]), torch.full((1, 1, 3), 1 / 3).log())
    verified = verify(policy_BQV, drafts, settings(top_k=2), numbers(1, 2), torch.zeros(1, 1, dtype=torch.float64))
    assert verified.counts_B.tolist() == [1]
    assert verified.tokens_BQ[0, 0].item() < 2


# ---------------------------------------------------------------- drafts made with certainty
@pytest.mark.parametrize("filters", FILTERS)
def test_certain_drafts_do_not_change_the_sampled_tokens(filters: dict[str, Any]) -> None:
    logits_BQV = torch.randn(500, 3, VOCABULARY, generator=GENERATOR)
    sample_BQ = numbers(500, 3)
    drafts = certain(logits_BQV[:, :2].argmax(-1).tolist(), [2] * 500)
    verified = verify(logits_BQV, drafts, settings(**filters), sample_BQ)
    plain = choose(logits_BQV.flatten(0, 1), settings(**filters), sample_BQ.flatten()).tokens_B.view(500, 3)
    assert torch.equal(verified.tokens_BQ, plain)
    agreed = (plain[:, :2] == drafts.tokens_BK).tolist()
    assert verified.counts_B.tolist() == [1 + (first and 1 + second) for first, second in agreed]
    assert set(verified.counts_B.tolist()) == {1, 2, 3}


def test_greedy_tokens_are_the_likeliest_whatever_is_drafted() -> None:
    logits_BQV = torch.randn(300, 4, VOCABULARY, generator=GENERATOR)
    drafts = certain(torch.randint(0, 2, (300, 3), generator=GENERATOR).tolist(), [3] * 300)
    verified = verify(logits_BQV, drafts, settings(temperature=0), None)
    assert torch.equal(verified.tokens_BQ, logits_BQV.argmax(-1))
    assert len(set(verified.counts_B.tolist())) > 2


def test_greedy_choice_asks_not_how_a_draft_was_made() -> None:
    logits_BQV = table(VOCABULARY, 3)[:3].expand(1, 3, -1)
    sampled = Drafts(torch.tensor([[0, 0]]), torch.tensor([2]), torch.zeros(1, 2, VOCABULARY).log_softmax(-1))
    verified = verify(logits_BQV, sampled, settings(temperature=0), None)
    assert torch.equal(verified.tokens_BQ, logits_BQV.argmax(-1))


def test_what_lies_behind_a_drafts_end_is_not_accepted() -> None:
    logits_BQV = torch.zeros(3, 3, VOCABULARY).index_fill(2, torch.tensor([5]), 50.0)
    verified = verify(logits_BQV, certain([[5, 5]] * 3, [0, 1, 2]), settings(), numbers(3, 3))
    assert verified.counts_B.tolist() == [1, 2, 3]


def test_behind_a_sampled_drafts_end_the_policy_is_sampled() -> None:
    policy_V = table(VOCABULARY, 1)[0]
    count = 20_000
    logprobs_BKV = torch.full((count, 2, VOCABULARY), 1 / VOCABULARY).log()
    drafts = Drafts(torch.zeros(count, 2, dtype=torch.long), torch.zeros(count, dtype=torch.long), logprobs_BKV)
    verified = verify(policy_V.expand(count, 3, -1), drafts, settings(), numbers(count, 3), numbers(count, 2))
    observed_V = torch.bincount(verified.tokens_BQ[:, 0], minlength=VOCABULARY)
    assert deviation(observed_V.tolist(), distribution(policy_V[None], settings())[0].tolist()) < 5


# ---------------------------------------------------------------- what is recorded
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("sampled", [True, False])
def test_tokens_carry_the_policys_log_probabilities(filters: dict[str, Any], sampled: bool) -> None:
    logits_BQV = torch.randn(200, 3, VOCABULARY, generator=GENERATOR)
    drafted_BKV = torch.randn(200, 2, VOCABULARY, generator=GENERATOR).log_softmax(-1)
    drafts = Drafts(drafted_BKV.argmax(-1), torch.full((200,), 2), drafted_BKV if sampled else None)
    sampling = settings(**filters)
    verified = verify(logits_BQV, drafts, sampling, numbers(200, 3), numbers(200, 2))
    valid_BQ = torch.arange(3) < verified.counts_B[:, None]
    exact = distribution(logits_BQV, sampling).log().gather(2, verified.tokens_BQ[..., None])[..., 0]
    full = (logits_BQV / sampling.temperature).log_softmax(-1).gather(2, verified.tokens_BQ[..., None])[..., 0]
    assert torch.allclose(verified.logprobs_BQ[valid_BQ].double(), exact[valid_BQ], atol=1e-5)
    assert torch.allclose(verified.full_logprobs_BQ[valid_BQ], full[valid_BQ], atol=1e-5)
    if verified.kept_BQV is not None:
        assert torch.equal(verified.kept_BQV, distribution(logits_BQV, sampling) > 0)
    assert (verified.kept_BQV is not None) == sampling.truncated


def test_a_row_ends_at_its_first_end_token_and_at_its_budget() -> None:
    tokens_BQ = torch.tensor([[1, 9, 2, 9], [1, 2, 3, 9], [9, 1, 1, 1], [1, 2, 3, 4], [1, 2, 3, 4], [9, 9, 9, 9]])
    counts_B = torch.tensor([4, 3, 2, 4, 4, 4])
    zeros_BQ = torch.zeros(6, 4)
    verified = Verified(tokens_BQ, counts_B, zeros_BQ, zeros_BQ, None)
    remaining_B = torch.tensor([9, 9, 9, 9, 2, 0])
    assert cut(verified, torch.tensor([9, 8]), remaining_B).tolist() == [2, 3, 1, 4, 2, 0]
