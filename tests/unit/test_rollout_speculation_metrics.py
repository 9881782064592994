"""What drafting tells, step by step, with numbers that can be checked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from grpo_engine.rollout.speculation_metrics import SpeculationMetrics


def add(
    metrics: SpeculationMetrics, fed: int, drafted: list[int], accepted: list[int], gained: list[int],
    seconds: float = 1.0, plain_seconds: float | None = None,
) -> None:  # fmt: skip
    metrics.add(fed, np.array(drafted), np.array(accepted), np.array(gained), seconds, plain_seconds)


def test_rows_count_by_what_was_meant_for_them_and_accepted() -> None:
    metrics = SpeculationMetrics()
    add(metrics, 2, [2, 1, 0], [2, 0, 0], [3, 1, 1])
    add(metrics, 0, [0, 0, 0], [0, 0, 0], [1, 1, 1])
    assert metrics.take() == {
        "rollout/drafted_tokens": 3,
        "rollout/draft_length_mean": 1,
        "rollout/draft_length_share_0": 0.5,
        "rollout/draft_length_share_2": 0.5,
        "rollout/tokens_per_forward": pytest.approx(8 / 6),
        "rollout/accepted_share": pytest.approx(2 / 3),
        "rollout/accepted_share_1": 0.5,
        "rollout/accepted_share_2": 1,
    }
    assert metrics.take() == {}


def test_the_gain_is_the_time_of_as_many_plain_tokens_against_that_of_the_steps() -> None:
    """Two rows gain 6 tokens in 3 s, plain decoding in 3 steps of 2 s; an untimed step counts for nothing."""
    metrics = SpeculationMetrics()
    add(metrics, 2, [2, 2], [2, 2], [3, 3], seconds=3.0, plain_seconds=2.0)
    add(metrics, 2, [2, 2], [0, 0], [1, 1], seconds=9.0)
    add(metrics, 2, [], [], [], seconds=9.0, plain_seconds=2.0)
    assert metrics.take()["rollout/draft_gain"] == 2


def test_what_no_row_had_is_not_told() -> None:
    metrics = SpeculationMetrics()
    add(metrics, 3, [], [], [])
    assert metrics.take() == {
        "rollout/drafted_tokens": 0, "rollout/draft_length_mean": 3, "rollout/draft_length_share_3": 1,
    }  # fmt: skip
    add(metrics, 2, [1, 0], [0, 0], [1, 1])
    assert "rollout/accepted_share_2" not in metrics.take()
