"""The detectors on journals recorded from real runs: silent on healthy ones, in time on failing ones.

tests/data/journals/{healthy,failing}-*.jsonl.gz, with labels.json beside them:
    {"failing-entropy-0": {"detector": "entropy_collapse", "onset_step": 12},
     "healthy-demo-0": {"highest_reward": 1.1, "config": {"flat_reward_steps": 30}}}
`onset_step` is the first step of the failure as the run was set up; `config` (default: the defaults) holds the
DetectorsConfig fields of the run, `highest_reward` (default 1.1: accuracy + 0.1 format) and `lowest_reward` (0) bound
its reward.
"""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from grpo_engine.config import DetectorsConfig
from grpo_engine.diagnostics.detectors import Detectors, FindingFields
from grpo_engine.events import Metrics, parse_line

FOLDER = Path(__file__).parents[1] / "data" / "journals"
RECORD_THEM = f"no such recorded journals in {FOLDER}; record real runs and add them with their labels"
ALL_DETECTORS = {"non_finite", "zero_variance", "entropy_collapse", "truncation", "flat_reward"}
SLACK_STEPS = 5


def names(kind: str) -> list[str]:
    """Recorded journals of a kind; a name that is never there when none was recorded, so that its test fails."""
    return sorted(path.name.removesuffix(".jsonl.gz") for path in FOLDER.glob(f"{kind}-*.jsonl.gz")) or [f"{kind}-none"]


@cache
def labels() -> dict[str, dict[str, Any]]:
    path = FOLDER / "labels.json"
    assert path.exists(), RECORD_THEM
    loaded: dict[str, dict[str, Any]] = json.loads(path.read_text())
    return loaded


@cache
def steps(name: str) -> list[tuple[int, dict[str, float]]]:
    """(step, values) of the journal's RL stage, non-finite numbers restored."""
    path = FOLDER / f"{name}.jsonl.gz"
    assert path.exists(), RECORD_THEM
    with gzip.open(path, "rt") as lines:
        events = [parse_line(line) for line in lines]
    metrics = [event for event in events if isinstance(event, Metrics) and (event.stage or "").endswith("-rl")]
    return [(event.step, restored(event)) for event in metrics]


def restored(event: Metrics) -> dict[str, float]:
    return {name: float(event.nonfinite[name]) if value is None else value for name, value in event.values.items()}


def watch(name: str) -> Detectors:
    label = labels().get(name, {})
    config = DetectorsConfig.model_validate(label.get("config", {}))
    bounds = {"highest_reward": label.get("highest_reward", 1.1), "lowest_reward": label.get("lowest_reward", 0.0)}
    return Detectors(config, **bounds)


def findings(name: str) -> list[FindingFields]:
    detectors = watch(name)
    return [finding for step, values in steps(name) for finding in detectors.update(step, values)]


def test_ten_healthy_runs_and_every_detector_are_recorded() -> None:
    assert len(names("healthy")) >= 10, RECORD_THEM
    assert {labels()[name]["detector"] for name in names("failing")} == ALL_DETECTORS


@pytest.mark.parametrize("name", names("healthy"))
def test_healthy_runs_are_silent(name: str) -> None:
    assert len(steps(name)) >= 20
    assert findings(name) == []


@pytest.mark.parametrize("name", names("failing"))
def test_failing_runs_are_found_within_five_steps_of_the_onset(name: str) -> None:
    assert steps(name), f"{name} holds no metrics of an RL stage"
    label = labels()[name]
    found = [finding for finding in findings(name) if finding.detector == label["detector"] and not finding.resolved]
    assert found, f"{label['detector']} did not fire"
    # A flat reward can be known only when its window is full.
    window = DetectorsConfig.model_validate(label.get("config", {})).flat_reward_steps
    needed = window - 1 if label["detector"] == "flat_reward" else 0
    assert abs(found[0].onset_step - label["onset_step"]) <= SLACK_STEPS
    assert label["onset_step"] <= found[0].step <= label["onset_step"] + needed + SLACK_STEPS


@pytest.mark.parametrize("name", names("failing"))
def test_a_watch_resumed_in_the_middle_says_the_same(name: str) -> None:
    recorded, first, second = steps(name), watch(name), watch(name)
    middle = len(recorded) // 2
    told = [finding for step, values in recorded[:middle] for finding in first.update(step, values)]
    second.restore(json.loads(json.dumps(first.state())))
    told += [finding for step, values in recorded[middle:] for finding in second.update(step, values)]
    assert told == findings(name)
