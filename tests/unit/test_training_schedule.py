from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from grpo_engine.config import OptimizerConfig
from grpo_engine.training.schedule import learning_rate


def rates(num_steps: int, **options: Any) -> list[float]:
    config = OptimizerConfig(learning_rate=1.0, **options)
    return [learning_rate(config, step, num_steps) for step in range(1, num_steps + 1)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 1, 1, 1]),
        ({"warmup_steps": 2}, [0.5, 1, 1, 1]),
        ({"schedule": "linear"}, [1, 2 / 3, 1 / 3, 0]),
        ({"schedule": "linear", "warmup_steps": 2, "final_rate_share": 0.2}, [0.5, 1, 0.6, 0.2]),
        ({"schedule": "cosine", "final_rate_share": 0.1}, [1, 0.1 + 0.9 * 0.75, 0.1 + 0.9 * 0.25, 0.1]),
        ({"schedule": "cosine", "warmup_steps": 4}, [0.25, 0.5, 0.75, 1]),
        ({"schedule": "linear", "warmup_steps": 8}, [0.125, 0.25, 0.375, 0.5]),
    ],
)
def test_rates_by_hand(options: dict[str, Any], expected: list[float]) -> None:
    assert rates(4, **options) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("num_steps", [8, 100, 501])
def test_last_rate_is_exact_and_the_fall_is_monotone(schedule: str, warmup: int, num_steps: int) -> None:
    config = OptimizerConfig(learning_rate=3e-3, warmup_steps=warmup, schedule=schedule, final_rate_share=0.05)
    values = [learning_rate(config, step, num_steps) for step in range(1, num_steps + 1)]
    assert values[-1] == 3e-3 * 0.05
    assert max(values) == values[max(warmup, 1) - 1] == 3e-3
    assert all(a > b for a, b in itertools.pairwise(values[max(warmup, 1) - 1 :]))
    assert all(a < b for a, b in itertools.pairwise(values[: max(warmup, 1)]))


def test_steps_beyond_the_last_keep_the_final_rate() -> None:
    config = OptimizerConfig(learning_rate=1.0, schedule="linear", final_rate_share=0.5)
    assert learning_rate(config, 11, 10) == learning_rate(config, 10, 10) == 0.5


def test_a_stage_of_one_step_uses_the_peak() -> None:
    assert rates(1, schedule="cosine") == [1.0]
    assert math.isfinite(rates(1, schedule="linear", warmup_steps=1)[0])
