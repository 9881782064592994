"""The verdict dot beside a key indicator: good, warning, bad or none, with the reason in a sentence. Torch-free.

Thresholds follow what rldoctor and rlprobe use, and are only a first look: detectors decide what becomes a finding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

Level = Literal["good", "warning", "bad", "none"]
_FEW = 10
"""Earlier values below which nothing is compared with the past."""


@dataclass(frozen=True, slots=True)
class Verdict:
    level: Level
    reason: str


def verdict(name: str, value: float | None, history: Sequence[float]) -> Level:
    """The level of `judge` alone."""
    return judge(name, value, history).level


def judge(name: str, value: float | None, history: Sequence[float]) -> Verdict:
    """Judge the newest `value`; `history` holds the finite values before it, oldest first.

    A metric without a rule, or without a value yet, gets "none"."""
    if value is None:
        return Verdict("none", "No value yet.")
    if not math.isfinite(value):
        return Verdict("bad", f"The newest value is {value}.")
    past = [number for number in history if math.isfinite(number)]
    if name in _LIMITS:
        return _LIMITS[name].judge(value)
    return _RULES[name](value, past) if name in _RULES else Verdict("none", "There is no rule for this metric.")


@dataclass(frozen=True, slots=True)
class Limits:
    """Good below `warning`, bad from `bad` on."""

    warning: float
    bad: float
    sentence: str
    unit: Literal["percent", "number"] = "percent"

    def judge(self, value: float) -> Verdict:
        level: Level = "good" if value < self.warning else "warning" if value < self.bad else "bad"
        return Verdict(level, f"{self._show(value)} {self.sentence}; good below {self._show(self.warning)}.")

    def _show(self, value: float) -> str:
        return f"{value:.0%}" if self.unit == "percent" else f"{value:.3g}"


_LIMITS: dict[str, Limits] = {
    "groups/zero_variance_share": Limits(0.5, 0.75, "of the groups carry no gradient"),
    "policy/kl": Limits(0.5, 2.0, "nats from the stage's start", "number"),
    "policy/clip_share": Limits(0.2, 0.4, "of the tokens are clipped"),
    "policy/ratio_max": Limits(5, 50, "times as likely as before is the most any token became", "number"),
    "value/clip_share": Limits(0.3, 0.6, "of the values are clipped"),
    "sampler/masked_share": Limits(0.05, 0.3, "of the tokens are left out by the correction"),
    "guards/rollbacks": Limits(1, 3, "rollbacks in this stage", "number"),
    "memory/fragmentation_share": Limits(0.3, 0.5, "of the reserved memory lies unused"),
    "sampler/logprob_gap_k3": Limits(0.01, 0.1, "nats between sampler and trainer", "number"),
    "completion/truncated_share": Limits(0.1, 0.5, "of the completions are cut by the token limit"),
    "staleness/max": Limits(3, 5, "steps old at most", "number"),
}


def _reward(value: float, past: Sequence[float]) -> Verdict:
    if len(past) < _FEW:
        return Verdict("none", "Too few steps to tell.")
    recent, before = fmean([*past[-4:], value]), fmean(past[-9:-4])
    spread = max(past) - min(past)
    if recent < before - 0.25 * spread:
        return Verdict("warning", f"The last 5 steps average {recent:.3g}, the 5 before {before:.3g}: it falls.")
    if recent > past[0]:
        return Verdict("good", f"The last 5 steps average {recent:.3g}; the run began at {past[0]:.3g}.")
    return Verdict("none", f"The last 5 steps average {recent:.3g}, no more than at the start ({past[0]:.3g}).")


def _accuracy(value: float, past: Sequence[float]) -> Verdict:
    if not past:
        return Verdict("none", "This is the first evaluation.")
    if value < past[0] - 0.05:
        return Verdict("bad", f"{value:.0%} is below the {past[0]:.0%} before training.")
    if value < max(past) - 0.1:
        return Verdict("warning", f"{value:.0%}, after a best of {max(past):.0%}.")
    if value > past[0]:
        return Verdict("good", f"{value:.0%}, up from {past[0]:.0%} before training.")
    return Verdict("none", f"{value:.0%}, as before training.")


def _entropy(value: float, past: Sequence[float]) -> Verdict:
    if not past or past[0] <= 0:
        return Verdict("none", "There is no first value to compare with.")
    share = value / past[0]
    sentence = f"{value:.3g} nats, {share:.0%} of the first value"
    if share < 0.05 and value < 0.01:
        return Verdict("bad", f"{sentence}: the policy hardly explores.")
    if share < 0.1:
        return Verdict("warning", f"{sentence}; good from 10% on.")
    return Verdict("good", f"{sentence}.")


def _gradient(value: float, past: Sequence[float]) -> Verdict:
    if value == 0:
        return Verdict("warning", "The gradient is exactly zero: nothing was learned in this step.")
    if len(past) < _FEW:
        return Verdict("none", "Too few steps to tell.")
    usual = median(past)
    if usual > 0 and value > 3 * usual:
        level: Level = "bad" if value > 10 * usual else "warning"
        return Verdict(level, f"{value:.3g} is {value / usual:.0f} times the median of {usual:.3g}.")
    return Verdict("good", f"{value:.3g}, median {usual:.3g}.")


def _throughput(value: float, past: Sequence[float]) -> Verdict:
    if len(past) < _FEW:
        return Verdict("none", "Too few steps to tell.")
    usual = median(past)
    if value < 0.5 * usual:
        return Verdict("warning", f"{value:.3g} tokens/s is less than half of the median of {usual:.3g}.")
    return Verdict("good", f"{value:.3g} tokens/s, median {usual:.3g}.")


def _memory(value: float, past: Sequence[float]) -> Verdict:
    if len(past) < _FEW:
        return Verdict("none", "Too few steps to tell.")
    early = median(past[:5])
    if value > 1.5 * early:
        return Verdict("warning", f"{value / 1e9:.3g} GB, {value / early:.1f} times that of the first steps.")
    return Verdict("good", f"{value / 1e9:.3g} GB, steady since the first steps.")


def _weight(value: float, past: Sequence[float]) -> Verdict:
    away = abs(value - 1)
    level: Level = "good" if away < 0.05 else "warning" if away < 0.2 else "bad"
    return Verdict(level, f"{value:.3g}; good within 0.05 of 1, where sampler and trainer agree.")


def _explained(value: float, past: Sequence[float]) -> Verdict:
    if len(past) < _FEW:
        return Verdict("none", "Too few steps to tell.")
    if value < 0:
        return Verdict("bad", f"{value:.3g}: the critic predicts worse than the mean of the returns.")
    if value < 0.2:
        return Verdict("warning", f"{value:.3g}: the critic explains little of the returns; good from 0.2 on.")
    return Verdict("good", f"{value:.3g} of the returns' variance; good from 0.2 on.")


def _rate_scale(value: float, past: Sequence[float]) -> Verdict:
    if value < 1:
        return Verdict("warning", f"A guard has lowered the rate to {value:.3g} of its schedule.")
    return Verdict("good", "The rate follows its schedule.")


_RULES: dict[str, Callable[[float, Sequence[float]], Verdict]] = {
    "reward/mean": _reward,
    "evaluation/accuracy_greedy": _accuracy,
    "policy/entropy": _entropy,
    "optimizer/gradient_norm": _gradient,
    "optimizer/rate_scale": _rate_scale,
    "value/gradient_norm": _gradient,
    "value/explained_variance": _explained,
    "sampler/weight_mean": _weight,
    "throughput/tokens_per_s": _throughput,
    "throughput/train_tokens_per_s": _throughput,
    "memory/rss_bytes": _memory,
}
