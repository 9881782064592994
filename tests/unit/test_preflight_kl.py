"""The preflight warns of KL settings whose gradient is not that of the KL."""

from typing import Any

import pytest

from grpo_engine.checks.report import Report
from grpo_engine.checks.training import check_training
from grpo_engine.config_errors import load_config
from tests.invalid_configs import changed


def warned_fields(kl: dict[str, Any], advantage: str) -> list[str]:
    stage = {"kl": {"weight": 0.01, **kl}, "advantage": {"kind": advantage}}
    config = load_config(changed({f"stages.0.{name}": value for name, value in stage.items()}))
    report = Report()
    check_training(config, 0, config.stages[0], report)  # type: ignore[arg-type]
    return [warning.field for warning in report.warnings]


@pytest.mark.parametrize(
    ("kl", "advantage", "fields"),
    [
        ({"estimator": "k1"}, "grpo", ["stages.0.kl.estimator"]),
        ({"estimator": "k3", "place": "reward"}, "rloo", ["stages.0.kl.estimator"]),
        ({"estimator": "k1", "place": "reward"}, "grpo", ["stages.0.kl.place"]),
        ({"estimator": "k2", "place": "reward"}, "rank", ["stages.0.kl.estimator", "stages.0.kl.place"]),
    ],
)
def test_a_kl_that_does_not_pull_as_meant_is_warned_of(kl: dict[str, Any], advantage: str, fields: list[str]) -> None:
    assert warned_fields(kl, advantage) == fields


@pytest.mark.parametrize(
    ("kl", "advantage"),
    [
        ({"estimator": "k1", "unbiased": True}, "grpo"),
        ({"estimator": "k3"}, "grpo"),
        ({"estimator": "k1", "place": "reward"}, "gae"),
        ({"estimator": "k1", "weight": 0.0}, "grpo"),
    ],
)
def test_a_kl_that_pulls_as_meant_is_not(kl: dict[str, Any], advantage: str) -> None:
    assert warned_fields(kl, advantage) == []
