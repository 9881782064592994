"""Tokens and log-probabilities in C against float64 and against the same by torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_engine.config import SamplingConfig
from grpo_engine.rollout import choice
from grpo_engine.rollout.native.compiled import library
from grpo_engine.rollout.native.pick import pick

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler")
WIDTHS = [1, 7, 16, 127, 128, 129, 300, 4361]
BELOW_ONE = math.nextafter(1.0, 0.0)
CLOSE: dict[str, Any] = {"rtol": 3e-7, "atol": 1e-6}


def picked(scaled: Tensor, kept: Tensor | None, uniforms: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found = pick(scaled, kept, uniforms, with_all=True)
    assert found is not None
    assert found[3] is not None
    return (*found[:3], found[3])


def logits(rows: int, vocabulary: int, size: float = 3.0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * size


def numbers(rows: int) -> Tensor:
    return torch.linspace(0, BELOW_ONE, rows, dtype=torch.float64)


def mask(like: Tensor) -> Tensor:
    kept = torch.rand(like.shape, generator=torch.Generator().manual_seed(1)) < 0.3
    return kept.scatter(1, like.argmax(1, keepdim=True), True)


@pytest.mark.parametrize("vocabulary", WIDTHS)
@pytest.mark.parametrize("is_masked", [False, True])
def test_tokens_are_the_inverse_of_the_cumulative_distribution(vocabulary: int, is_masked: bool) -> None:
    scaled, uniforms = logits(200, vocabulary), numbers(200)
    kept = mask(scaled) if is_masked else None
    tokens, *_ = picked(scaled, kept, uniforms)
    weights = scaled.double().softmax(1)
    weights = weights if kept is None else weights * kept
    above = (weights.cumsum(1) / weights.sum(1, keepdim=True)).gather(1, tokens[:, None])[:, 0]
    share = weights.gather(1, tokens[:, None])[:, 0] / weights.sum(1)
    assert (share > 0).all()
    assert (above > uniforms - 1e-6).all()
    assert (above - share < uniforms + 1e-6).all()


@pytest.mark.parametrize("vocabulary", WIDTHS)
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("shift", [30, -30])
def test_log_probabilities(vocabulary: int, is_masked: bool, shift: int) -> None:
    scaled = logits(9, vocabulary) + shift
    kept = mask(scaled) if is_masked else torch.ones_like(scaled, dtype=torch.bool)
    tokens, logprobs, full, every = picked(scaled, kept if is_masked else None, numbers(9))
    expected = scaled.double().masked_fill(~kept, float("-inf")).log_softmax(1)
    torch.testing.assert_close(every.double(), expected, **CLOSE)
    torch.testing.assert_close(logprobs.double(), expected.gather(1, tokens[:, None])[:, 0], **CLOSE)
    all_of_them = scaled.double().log_softmax(1)
    torch.testing.assert_close(full.double(), all_of_them.gather(1, tokens[:, None])[:, 0], **CLOSE)


@pytest.mark.parametrize("vocabulary", WIDTHS)
def test_the_likeliest_is_the_first_of_those_that_tie(vocabulary: int) -> None:
    scaled = logits(3, vocabulary).round() / 4 - 10
    assert picked(scaled, None, None)[0].tolist() == [row.index(max(row)) for row in scaled.tolist()]


@pytest.mark.parametrize("number", [0.0, 0.5, BELOW_ONE])
@pytest.mark.parametrize("only", [0, 127, 128, 255, 299])
def test_what_is_impossible_never_comes(number: float, only: int) -> None:
    at = torch.tensor([number], dtype=torch.float64)
    scaled = torch.full((1, 300), float("-inf"))
    scaled[0, only] = 1.0
    assert picked(scaled, None, at)[0].item() == only
    kept = scaled > 0
    assert picked(torch.zeros(1, 300), kept, at)[0].item() == only
    far = torch.full((1, 300), -200.0)
    far[0, only] = 0.0
    assert picked(far, None, at)[0].item() == only


def test_rows_do_not_depend_on_their_batch_or_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled, uniforms = logits(64, 4361), numbers(64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    together = picked(scaled, None, uniforms)
    for row in (0, 21, 63):
        alone = picked(scaled[row : row + 1], None, uniforms[row : row + 1])
        assert all(torch.equal(whole[row : row + 1], part) for whole, part in zip(together, alone, strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("num_kept", [0, 1, 299, 300])
def test_nan_and_infinity_show_in_the_log_probabilities_under_every_mask(bad: float, num_kept: int) -> None:
    scaled, kept = logits(1, 300), (torch.arange(300) < num_kept)[None]
    scaled[0, 299] = bad
    for uniforms in (None, numbers(1)):
        token, logprob, full, every = picked(scaled, kept, uniforms)
        assert 0 <= token.item() < 300
        assert all(told.isnan().all() for told in (logprob, full, every))


def test_strides_are_no_matter() -> None:
    wide, kept = logits(8, 600), mask(logits(8, 300)).t().contiguous().t()
    thin = wide[:, ::2]
    wanted = picked(thin.contiguous(), kept.contiguous(), numbers(8))
    assert all(map(torch.equal, picked(thin, kept, numbers(8)), wanted))


def test_other_types_are_left_to_torch_or_refused() -> None:
    assert pick(logits(1, 9).bfloat16(), None, None) is None
    with pytest.raises(TypeError, match="float64"):
        pick(logits(1, 9), None, torch.zeros(1))
    with pytest.raises(TypeError, match="bool"):
        pick(logits(1, 9), torch.zeros(1, 9), None)
    with pytest.raises(ValueError, match="empty"):
        pick(logits(1, 0), None, None)
    with pytest.raises(TypeError, match="bool"):
        pick(logits(2, 9), torch.ones(1, 9, dtype=torch.bool), None)


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.7, "top_k": 4}, {"min_p": 0.05, "top_p": 0.9}])
@pytest.mark.parametrize("vocabulary", [56, 4361])
def test_torch_chooses_and_draws_the_same(
    monkeypatch: pytest.MonkeyPatch, filters: dict[str, Any], vocabulary: int
) -> None:
    sampling, scaled, uniforms = SamplingConfig(**filters), logits(50, vocabulary), numbers(52)[1:-1]
    in_c, drawn = choice.choose(scaled, sampling, uniforms), choice.draw(scaled, sampling, uniforms)
    monkeypatch.setattr(choice, "pick", lambda *_, **__: None)
    by_torch, drawn_by_torch = choice.choose(scaled, sampling, uniforms), choice.draw(scaled, sampling, uniforms)
    assert torch.equal(in_c.tokens_B, by_torch.tokens_B)
    assert torch.equal(drawn[0], drawn_by_torch[0])
    assert torch.equal(in_c.tokens_B, drawn[0])
    torch.testing.assert_close(in_c.logprobs_B, by_torch.logprobs_B, **CLOSE)
    torch.testing.assert_close(in_c.full_logprobs_B, by_torch.full_logprobs_B, **CLOSE)
    torch.testing.assert_close(drawn[1], drawn_by_torch[1], **CLOSE)
