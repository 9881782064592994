"""Shares of accepted drafts, and the tokens that they promise."""

from __future__ import annotations

import pytest

from grpo_engine.rollout.acceptance import Acceptance


def test_expected_tokens_are_one_and_the_products_of_the_shares() -> None:
    acceptance = Acceptance()
    for _ in range(50):
        acceptance.add([1000, 800, 400])
    assert acceptance.expected_tokens(0) == 1
    assert acceptance.expected_tokens(1) == pytest.approx(1.8, abs=0.01)
    assert acceptance.expected_tokens(2) == pytest.approx(2.2, abs=0.02)
    assert acceptance.expected_tokens(3) == pytest.approx(2.4, abs=0.03)


def test_acceptance_follows_the_latest_drafts() -> None:
    acceptance = Acceptance()
    acceptance.add([5000, 5000])
    for _ in range(6):
        acceptance.add([128, 0])
    assert acceptance.expected_tokens(1) < 1.1
