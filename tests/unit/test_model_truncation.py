"""Which tokens truncated sampling keeps."""

from __future__ import annotations

import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from grpo_engine.model.truncation import kept_mask


def kept(probabilities: list[float], top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    mask = kept_mask(torch.tensor([probabilities]).log(), top_k, top_p, min_p)
    return mask[0].nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 0.3}, [3]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.75}, [1, 2, 3]),
        ({"min_p": 0.5}, [1, 2, 3]),
        ({"min_p": 0.74}, [1, 3]),
        ({"top_p": 0.5}, [1, 3]),
        # top-p sees what top-k left: 0.4 of 0.7 is 0.57, so one token is enough for 0.5
        ({"top_k": 2, "top_p": 0.5}, [3]),
        ({"top_k": 2, "top_p": 0.6, "min_p": 0.9}, [3]),
    ],
)
def test_hand_computed_sets(filters: dict[str, float], expected: list[int]) -> None:
    assert kept([0.1, 0.3, 0.2, 0.4], **filters) == expected


def test_ties_share_their_fate() -> None:
    assert kept([0.25, 0.25, 0.25, 0.25], top_k=1) == [0, 1, 2, 3]
    assert kept([0.4, 0.2, 0.2, 0.2], top_p=0.5) == [0, 1, 2, 3]
    assert kept([0.4, 0.2, 0.3, 0.1], top_k=1) == [0]


def test_the_likeliest_token_is_always_kept() -> None:
    assert kept([0.2, 0.5, 0.3], top_k=1, top_p=1e-9, min_p=0.999) == [1]


def test_impossible_tokens_are_not_kept_by_a_high_top_p() -> None:
    assert kept([0.5, 0.0, 0.5], top_k=2, top_p=1 - 1e-12) == [0, 2]


def test_the_same_sets_as_transformers() -> None:
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(0)) * 3
    scores = logits
    for warper in (TopKLogitsWarper(20), TopPLogitsWarper(0.9), MinPLogitsWarper(0.05)):
        scores = warper(torch.zeros(1, 1), scores)
    assert torch.equal(kept_mask(logits, 20, 0.9, 0.05), scores.isfinite())
