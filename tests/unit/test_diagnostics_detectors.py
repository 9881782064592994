"""The five detectors on hand-made series: when they speak, what they say, and when they are silent."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from grpo_engine.config import DetectorsConfig
from grpo_engine.diagnostics.detectors import STEPS_TO_RESOLVE, Detectors, FindingFields
from grpo_engine.events import Finding

Series = Callable[[int], dict[str, float]]


def detectors(**changes: Any) -> Detectors:
    return Detectors(DetectorsConfig.model_validate(changes), highest_reward=1.0)


def run(watch: Detectors, series: Series, steps: Iterable[int]) -> list[FindingFields]:
    return [finding for step in steps for finding in watch.update(step, series(step))]


def healthy(step: int) -> dict[str, float]:
    noise = random.Random(step).gauss(0, 0.03)
    reward = 0.3 + 0.65 * (1 - math.exp(-step / 25))
    return {
        "reward/mean": reward + noise,
        "groups/zero_variance_share": min(0.95, 0.1 + reward**4),
        "policy/entropy": 0.6 * math.exp(-step / 40) + 0.02,
        "completion/truncated_share": 0.3 * math.exp(-step / 10),
        "loss": noise,
        "optimizer/gradient_norm": 0.4 + noise,
        "optimizer/skipped_steps": 0.0,
    }


def from_step(onset: int, **bad: float) -> Series:
    names = {name.replace("__", "/"): value for name, value in bad.items()}
    return lambda step: healthy(step) | (names if step >= onset else {})


def test_a_healthy_run_that_reaches_its_plateau_is_silent() -> None:
    assert run(detectors(), healthy, range(1, 301)) == []


@pytest.mark.parametrize(
    ("detector", "series"),
    [
        ("non_finite", from_step(20, loss=math.nan)),
        ("non_finite", from_step(20, optimizer__gradient_norm=math.inf)),
        ("non_finite", from_step(20, optimizer__skipped_steps=1.0)),
        ("zero_variance", from_step(20, groups__zero_variance_share=0.8, reward__mean=0.05)),
        ("entropy_collapse", from_step(20, policy__entropy=0.002)),
        ("truncation", from_step(20, completion__truncated_share=0.6)),
    ],
)
def test_each_detector_speaks_within_five_steps_of_the_onset(detector: str, series: Series) -> None:
    [finding] = run(detectors(), series, range(1, 25))
    assert finding.detector == detector
    assert finding.onset_step == 20
    assert finding.step >= 20


def test_a_flat_reward_is_told_once_its_window_is_full() -> None:
    [finding] = run(detectors(), lambda step: {"reward/mean": 0.3 + 0.01 * (step % 3)}, range(1, 100))
    assert (finding.detector, finding.onset_step, finding.step) == ("flat_reward", 1, 30)


def test_a_reward_that_stops_rising_is_told_and_resolved_when_it_rises_again() -> None:
    def reward(step: int) -> dict[str, float]:
        return {"reward/mean": 0.3 + 0.005 * (min(step, 40) + max(step - 100, 0))}

    told, over = run(detectors(), reward, range(1, 150))
    assert (told.resolved, told.severity, told.title) == (False, "info", "The reward has stopped rising")
    assert 55 <= told.step <= 75
    assert (over.resolved, over.severity) == (True, "info")
    assert 100 < over.step < 125


@pytest.mark.parametrize("level", [0.9, 0.95, 1.0])
def test_a_plateau_at_the_ceiling_is_not_flat(level: float) -> None:
    series: Series = lambda step: {"reward/mean": min(level, 0.3 + 0.02 * step)}  # noqa: E731
    assert run(detectors(), series, range(1, 200)) == []


@pytest.mark.parametrize(
    ("reward", "words"), [(0.02, "too hard"), (1.0, "too easy"), (0.87, "too easy"), (0.5, "always or never")]
)
def test_zero_variance_names_its_regime(reward: float, words: str) -> None:
    watch = detectors()
    findings = run(watch, lambda step: {"reward/mean": reward, "groups/zero_variance_share": 0.9}, range(1, 10))
    assert [words in finding.title for finding in findings] == [True]


def test_zero_variance_after_the_task_was_learned_is_no_finding() -> None:
    def learned(step: int) -> dict[str, float]:
        return {"reward/mean": min(0.4 + 0.02 * step, 0.97), "groups/zero_variance_share": min(0.02 * step, 0.95)}

    assert run(detectors(), learned, range(1, 150)) == []


def test_one_bad_step_short_of_the_limit_is_no_finding() -> None:
    series: Series = lambda step: {"completion/truncated_share": 0.9 if step % 3 else 0.1}  # noqa: E731
    assert run(detectors(), series, range(1, 60)) == []


def test_worsening_is_news_and_staying_bad_is_not() -> None:
    series: Series = lambda step: {"completion/truncated_share": 0.6 if step < 20 else 0.95}  # noqa: E731
    findings = run(detectors(), series, range(1, 60))
    assert [(finding.severity, finding.step) for finding in findings] == [("warning", 3), ("critical", 20)]
    assert {finding.onset_step for finding in findings} == {1}


def test_an_episode_ends_after_enough_good_steps_and_can_begin_again() -> None:
    bad = {*range(10, 15), *range(17, 20), *range(40, 45)}
    series: Series = lambda step: {"completion/truncated_share": 0.6 if step in bad else 0.0}  # noqa: E731
    findings = run(detectors(), series, range(1, 44))
    expected = [(12, 10, False), (19 + STEPS_TO_RESOLVE, 10, True), (42, 40, False)]
    assert [(finding.step, finding.onset_step, finding.resolved) for finding in findings] == expected


def test_missing_metrics_are_skipped_not_guessed() -> None:
    assert run(detectors(), lambda step: {}, range(1, 100)) == []
    assert run(detectors(), lambda step: {"reward/mean": math.nan, "policy/entropy": math.nan}, range(1, 9)) != []
    assert run(detectors(), lambda step: {"reward/mean": math.nan}, range(1, 100)) == []


def test_a_gap_in_a_metric_neither_ends_nor_feeds_a_streak() -> None:
    series: Series = lambda step: {} if step == 12 else {"completion/truncated_share": 0.6}  # noqa: E731
    [finding] = run(detectors(), series, range(11, 15))
    assert finding.step == 14


def test_thresholds_come_from_the_config() -> None:
    watch = detectors(truncated_share=0.2, truncated_steps=1)
    [finding] = watch.update(1, {"completion/truncated_share": 0.25})
    assert finding.detector == "truncation"


@pytest.mark.parametrize("cut", [1, 11, 21, 23, 40])
def test_a_resumed_watch_says_the_same(cut: int) -> None:
    series = from_step(20, completion__truncated_share=0.6, policy__entropy=0.001, loss=math.nan)
    whole = run(detectors(), series, range(1, 60))
    first, second = detectors(), detectors()
    before = run(first, series, range(1, cut + 1))
    second.restore(json.loads(json.dumps(first.state())))
    assert before + run(second, series, range(cut + 1, 60)) == whole
    assert len(whole) == 3


def test_findings_fit_the_journal_event_and_advise() -> None:
    for finding in run(detectors(), from_step(2, policy__entropy=0.0, loss=math.nan), range(1, 9)):
        event = Finding.model_validate({"seq": 1, "time": "2026-01-01T00:00:00Z", **finding.fields()})
        assert event.title
        assert event.evidence.endswith(".")
        assert event.remedy.endswith(".")
