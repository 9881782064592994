from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from grpo_engine.inference.reference import ReferenceScorer
from tests.unit.training_fixtures import assert_equal_bits, learner, ragged_rows, tiny_llama, update, weights


def test_scores_are_full_log_probabilities_in_the_order_of_the_rows() -> None:
    model, rows = tiny_llama(), ragged_rows(kept=True)
    scores = ReferenceScorer(model, max_micro_batch_tokens=24).score(rows, 0.7)
    for row, score in zip(rows, scores, strict=True):
        logits = model(torch.tensor([row.prompt_ids + row.completion_ids])).logits[0, len(row.prompt_ids) - 1 : -1]
        expected = (logits / 0.7).log_softmax(1).gather(1, torch.tensor(row.completion_ids)[:, None])[:, 0]
        assert score == pytest.approx(expected.tolist(), abs=1e-10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kl_of_an_untouched_policy_is_exactly_zero(dtype: str) -> None:
    model, rows = tiny_llama(dtype=torch.float32), ragged_rows(kept=True)
    reference = ReferenceScorer(copy.deepcopy(model), max_micro_batch_tokens=24, dtype=dtype)
    rows = [replace(row, ref_logprobs=score) for row, score in zip(rows, reference.score(rows, 0.7), strict=True)]
    assert update(learner(model, dtype=dtype), rows).stats["policy/kl"] == 0.0


def test_training_leaves_the_reference_alone() -> None:
    model, rows = tiny_llama(), ragged_rows()
    frozen = copy.deepcopy(model)
    scorer = ReferenceScorer(frozen, max_micro_batch_tokens=24)
    before, scores = weights(frozen), scorer.score(rows, 1.0)
    assert update(learner(model), rows).applied
    assert scorer.score(rows, 1.0) == scores
    assert_equal_bits(before, weights(frozen))
    assert not any(p.requires_grad for p in frozen.parameters())


def test_no_rows_give_no_scores() -> None:
    assert ReferenceScorer(tiny_llama(), max_micro_batch_tokens=24).score([], 1.0) == []


def test_a_smaller_token_limit_gives_the_same_scores() -> None:
    model, rows = tiny_llama(), ragged_rows()
    one, other = (ReferenceScorer(model, max_micro_batch_tokens=limit).score(rows, 0.7) for limit in (1, 1000))
    for ours, expected in zip(one, other, strict=True):
        assert ours == pytest.approx(expected, abs=1e-6)


def test_a_module_that_is_the_reference_only_at_times_is_not_frozen() -> None:
    model, rows, entered = tiny_llama(), ragged_rows(), []

    @contextmanager
    def around() -> Iterator[None]:
        entered.append(True)
        yield

    scorer = ReferenceScorer(model, max_micro_batch_tokens=24, around=around)
    assert scorer.score(rows, 1.0) == ReferenceScorer(copy.deepcopy(model), max_micro_batch_tokens=24).score(rows, 1.0)
    assert entered == [True]
    assert all(parameter.requires_grad for parameter in model.parameters())
