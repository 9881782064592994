"""Every metric is explained, and every key indicator can be judged."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from app.metrics.display import _place, indicators
from grpo_engine.diagnostics.catalogue import KEY_INDICATORS, METRICS, info, judge, verdict

FLAT = [1.0] * 12


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_has_label_description_and_group(name: str) -> None:
    metric = METRICS[name]
    assert metric.label
    assert metric.group
    assert metric.description.endswith(".")
    assert name.endswith("_s") == (metric.unit in ("s", "tokens/s"))
    assert name.endswith("_share") <= (metric.format == "percent")


def test_twelve_key_indicators_are_in_the_catalogue() -> None:
    assert len(set(KEY_INDICATORS)) == 12
    assert set(KEY_INDICATORS) <= set(METRICS)


def test_names_of_reward_parts_are_resolved() -> None:
    assert info("reward/part/accuracy/mean").label == "Part accuracy"
    assert info("reward/part/my_reward/abstained_share").format == "percent"
    assert info("reward/part/judge/spread").label == "Part judge, spread"
    assert info("behaviour/language_switches").label == "Language switches"
    assert info("reward/mean") is METRICS["reward/mean"]


def test_gradients_by_position_are_one_group_in_the_order_of_positions() -> None:
    names = ["gradient/position/1024-2047", "gradient/position/0-63", "gradient/position/512-1023"]
    assert info(names[0]).label == "Gradient, tokens 1024–2047"
    assert {info(name).group for name in names} == {"gradient by position"}
    assert sorted(names, key=_place) == [names[1], names[2], names[0]]


def test_names_with_a_draft_length_are_resolved() -> None:
    assert info("rollout/accepted_share_3").label == "Accepted, token 3"
    assert info("rollout/draft_length_share_0").label == "Drafts of 0"
    assert {info(f"rollout/{name}").format for name in ("accepted_share_1", "draft_length_share_5")} == {"percent"}


def test_what_a_device_wastes_takes_the_place_of_the_process_memory() -> None:
    values = {"reward/mean": [0.5], "memory/rss_bytes": [1e9]}
    assert indicators(values)[-1].name == "memory/rss_bytes"
    assert indicators(values | {"memory/fragmentation_share": [0.4]})[-1].name == "memory/fragmentation_share"


def test_unknown_names_are_shown_as_they_are() -> None:
    assert (info("foo/bar").label, info("foo/bar").group) == ("foo/bar", "foo")


@pytest.mark.parametrize(
    ("name", "value", "history", "level"),
    [
        ("reward/mean", 0.9, [0.1 * i for i in range(10)], "good"),
        ("reward/mean", 0.1, [0.8] * 8 + [0.2] * 4, "warning"),
        ("reward/mean", 0.5, [0.5] * 3, "none"),
        ("evaluation/accuracy_greedy", 0.9, [0.4, 0.7], "good"),
        ("evaluation/accuracy_greedy", 0.3, [0.4, 0.7], "bad"),
        ("evaluation/accuracy_greedy", 0.5, [0.4, 0.7], "warning"),
        ("groups/zero_variance_share", 0.2, [], "good"),
        ("groups/zero_variance_share", 0.5, [], "warning"),
        ("groups/zero_variance_share", 0.75, [], "bad"),
        ("policy/entropy", 0.5, FLAT, "good"),
        ("policy/entropy", 0.09, FLAT, "warning"),
        ("policy/entropy", 0.001, FLAT, "bad"),
        ("policy/kl", 0.01, [], "good"),
        ("policy/clip_share", 0.3, [], "warning"),
        ("sampler/logprob_gap_k3", 0.2, [], "bad"),
        ("optimizer/gradient_norm", 1.5, FLAT, "good"),
        ("optimizer/gradient_norm", 4.0, FLAT, "warning"),
        ("optimizer/gradient_norm", 40.0, FLAT, "bad"),
        ("optimizer/gradient_norm", 0.0, FLAT, "warning"),
        ("completion/truncated_share", 0.6, [], "bad"),
        ("staleness/max", 0, [], "good"),
        ("throughput/tokens_per_s", 0.4, FLAT, "warning"),
        ("memory/rss_bytes", 1.6, FLAT, "warning"),
        ("memory/rss_bytes", 1.1, FLAT, "good"),
        ("time/step_s", 1.0, FLAT, "none"),
        ("policy/ratio_max", 1.0, [], "good"),
        ("policy/ratio_max", 60.0, [], "bad"),
        ("value/explained_variance", 0.7, FLAT, "good"),
        ("value/explained_variance", 0.1, FLAT, "warning"),
        ("value/explained_variance", -0.1, FLAT, "bad"),
        ("value/explained_variance", -0.1, [], "none"),
        ("value/clip_share", 0.4, [], "warning"),
        ("value/gradient_norm", 4.0, FLAT, "warning"),
        ("sampler/weight_mean", 1.01, [], "good"),
        ("sampler/weight_mean", 0.9, [], "warning"),
        ("sampler/weight_mean", 1.3, [], "bad"),
        ("sampler/masked_share", 0.1, [], "warning"),
        ("memory/fragmentation_share", 0.4, [], "warning"),
        ("optimizer/rate_scale", 1.0, [], "good"),
        ("optimizer/rate_scale", 0.5, [], "warning"),
        ("guards/rollbacks", 0, [], "good"),
        ("guards/rollbacks", 1, [], "warning"),
        ("throughput/train_tokens_per_s", 0.4, FLAT, "warning"),
    ],
)
def test_verdicts_follow_their_thresholds(name: str, value: float, history: Sequence[float], level: str) -> None:
    assert verdict(name, value, history) == level
    assert judge(name, value, history).reason.endswith(".")


@pytest.mark.parametrize("name", KEY_INDICATORS)
def test_a_value_that_is_not_finite_is_bad_and_a_missing_one_is_no_verdict(name: str) -> None:
    assert verdict(name, math.nan, []) == "bad"
    assert verdict(name, None, FLAT) == "none"


@pytest.mark.parametrize("name", KEY_INDICATORS)
def test_every_key_indicator_has_a_rule(name: str) -> None:
    assert judge(name, 1.0, [*FLAT, math.nan]).reason != "There is no rule for this metric."
