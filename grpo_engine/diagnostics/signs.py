"""The five signs of a failing run: what each detector reads in one step's metrics. Torch-free.

A sign answers None when its metric is missing or not a number: it skips the step and guesses nothing. Otherwise it says
how bad the step is; `detectors` decides whether that is news.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from grpo_engine.config import DetectorsConfig
from grpo_engine.diagnostics.trend import robust_trend

Severity = Literal["info", "warning", "critical"]
Values = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Reading:
    """One sign's view of one step. severity None: nothing is wrong."""

    severity: Severity | None
    title: str = ""
    evidence: str = ""
    remedy: str = ""
    onset_step: int | None = None
    """Where it began, when that is not the first bad step."""


FINE = Reading(None)


@dataclass(frozen=True, slots=True)
class RewardRange:
    """Lowest and highest reward that the parts can give."""

    lowest: float
    highest: float

    def share(self, reward: float) -> float:
        """0 at the lowest, 1 at the highest reward."""
        width = self.highest - self.lowest
        return (reward - self.lowest) / width if width > 0 else 1.0


class Sign(Protocol):
    name: str
    needed_steps: int
    """Consecutive bad steps before it is news."""
    memory: dict[str, Any]
    """What it must remember across a resume; JSON values."""

    def read(self, step: int, values: Values) -> Reading | None: ...


def _number(values: Values, name: str) -> float | None:
    value = values.get(name)
    return value if value is not None and math.isfinite(value) else None


class NonFinite:
    """Loss, gradient or a log-probability metric is NaN or infinite, or the learner skipped a step because of it."""

    name = "non_finite"
    needed_steps = 1
    _WATCHED = ("loss", "optimizer/gradient_norm", "policy/entropy", "policy/kl", "policy/ratio_mean")

    def __init__(self) -> None:
        self.memory: dict[str, Any] = {}

    def read(self, step: int, values: Values) -> Reading | None:
        present = [name for name in self._WATCHED if values.get(name) is not None]
        skipped = _number(values, "optimizer/skipped_steps")
        if not present and skipped is None:
            return None
        bad = [f"{name} is {values[name]}" for name in present if not math.isfinite(values[name])]
        if skipped:
            bad.append("the optimizer step was skipped")
        if not bad:
            return FINE
        return Reading(
            "critical",
            "Loss or gradient is not a finite number",
            f"At step {step} {', '.join(bad)}.",
            "Lower optimizer.learning_rate, and check that dtype and custom rewards give finite numbers.",
        )


class ZeroVariance:
    """Most groups have equal rewards throughout, so that they carry no gradient.

    Reward decides the cure. At the top it is a finding only when the stage started there: a run that has risen to the
    ceiling has simply learned its task.
    """

    name = "zero_variance"
    _TOO_HARD, _TOO_EASY, _CRITICAL, _RISE = 0.15, 0.85, 0.95, 0.05

    def __init__(self, config: DetectorsConfig, rewards: RewardRange) -> None:
        self.needed_steps = config.zero_variance_steps
        self._threshold, self._ceiling, self._rewards = config.zero_variance_share, config.flat_reward_ceiling, rewards
        self.memory: dict[str, Any] = {"opening_reward": None}

    def read(self, step: int, values: Values) -> Reading | None:
        share, reward = _number(values, "groups/zero_variance_share"), _number(values, "reward/mean")
        if reward is not None and self.memory["opening_reward"] is None:
            self.memory["opening_reward"] = reward
        if share is None:
            return None
        level = None if reward is None else self._rewards.share(reward)
        if share < self._threshold or self._has_learned(level):
            return FINE
        title, remedy = self._regime(level)
        at = "" if reward is None else f" at a mean reward of {reward:.3g}"
        return Reading(
            "critical" if share >= self._CRITICAL else "warning",
            title,
            f"{share:.0%} of the groups have no reward variance{at}.",
            remedy,
        )

    def _has_learned(self, level: float | None) -> bool:
        if level is None or level < self._ceiling:
            return False
        return level - self._rewards.share(self.memory["opening_reward"]) >= self._RISE

    def _regime(self, level: float | None) -> tuple[str, str]:
        if level is None:
            return (
                "Most groups give no gradient",
                "Compare the prompts' difficulty with reward/mean, which is missing here.",
            )
        if level <= self._TOO_HARD:
            return "The prompts are too hard", (
                "Use easier prompts, a larger group_size, or a supervised stage first, so that some succeed."
            )
        if level >= self._TOO_EASY:
            return (
                "The prompts are too easy",
                "Use harder prompts, or end the stage: there is little left to learn here.",
            )
        return "Each prompt is solved always or never", (
            "Mix in middling prompts, raise sampling.temperature, or check that the reward tells answers apart."
        )


class EntropyCollapse:
    """The policy has become nearly deterministic: entropy under both floors."""

    name = "entropy_collapse"
    needed_steps = 3

    def __init__(self, config: DetectorsConfig) -> None:
        self._floor_share, self._floor_nats = config.entropy_floor_share, config.entropy_floor_nats
        self.memory: dict[str, Any] = {"first": None}

    def read(self, step: int, values: Values) -> Reading | None:
        entropy = _number(values, "policy/entropy")
        if entropy is None:
            return None
        if self.memory["first"] is None:
            self.memory["first"] = entropy
        first = float(self.memory["first"])
        if entropy >= self._floor_nats or entropy >= self._floor_share * first:
            return FINE
        return Reading(
            "critical",
            "The policy has collapsed to one answer",
            f"Entropy is {entropy:.2g} nats; it began at {first:.2g}, and the floor is "
            f"{min(self._floor_nats, self._floor_share * first):.2g}.",
            "Go back to an earlier checkpoint with a lower learning rate, a higher clip_high or a kl.weight above 0.",
        )


class Truncation:
    """Many completions are cut by the token limit; their rewards judge half an answer."""

    name = "truncation"
    _CRITICAL = 0.9

    def __init__(self, config: DetectorsConfig) -> None:
        self.needed_steps, self._threshold = config.truncated_steps, config.truncated_share
        self.memory: dict[str, Any] = {}

    def read(self, step: int, values: Values) -> Reading | None:
        share = _number(values, "completion/truncated_share")
        if share is None:
            return None
        if share < self._threshold:
            return FINE
        length = _number(values, "completion/mean_length_tokens")
        mean = "" if length is None else f"; their mean length is {length:.0f} tokens"
        return Reading(
            "critical" if share >= self._CRITICAL else "warning",
            "Completions run into the token limit",
            f"{share:.0%} of the completions were cut{mean}.",
            "Raise sampling.max_new_tokens, add a length reward, or set mask_truncated.",
        )


class FlatReward:
    """The mean reward has no upward trend over a whole window, and is not near the highest reward.

    Flat means: Theil-Sen's upper 95 % bound leaves room for a rise in the window of at most 5 % of the reward's range.
    After a stage has risen by a tenth of the range it is only a note, and needs stronger evidence: at most 2 %.
    """

    name = "flat_reward"
    needed_steps = 1
    _CONFIDENCE, _ROOM, _ROOM_AFTER_RISE, _RISE = 0.95, 0.05, 0.02, 0.1

    def __init__(self, config: DetectorsConfig, rewards: RewardRange) -> None:
        self._num_steps, self._ceiling, self._rewards = config.flat_reward_steps, config.flat_reward_ceiling, rewards
        self.memory: dict[str, Any] = {"window": [], "opening_reward": None}

    def read(self, step: int, values: Values) -> Reading | None:
        reward = _number(values, "reward/mean")
        if reward is None:
            return None
        if self.memory["opening_reward"] is None:
            self.memory["opening_reward"] = reward
        window = [*self.memory["window"], [step, reward]][-self._num_steps :]
        self.memory["window"] = window
        return FINE if len(window) < self._num_steps else self._judge(window)

    def _judge(self, window: list[list[float]]) -> Reading:
        steps, rewards = [int(pair[0]) for pair in window], [pair[1] for pair in window]
        level = self._rewards.share(sorted(rewards)[len(rewards) // 2])
        has_risen = level - self._rewards.share(self.memory["opening_reward"]) >= self._RISE
        trend = robust_trend(steps, rewards, self._CONFIDENCE)
        largest_rise = max(trend.upper * (steps[-1] - steps[0]), 0.0)
        room = self._ROOM_AFTER_RISE if has_risen else self._ROOM
        if level >= self._ceiling or largest_rise > room * (self._rewards.highest - self._rewards.lowest):
            return FINE
        evidence = (
            f"From step {steps[0]} to {steps[-1]} the mean reward went from {rewards[0]:.3g} to {rewards[-1]:.3g}; "
            f"with 95 % confidence it rose by at most {largest_rise:.2g}. The parts can give {self._rewards.highest:g}."
        )
        if has_risen:
            remedy = "End the stage (see early stopping), or go on with other prompts, larger groups or another rate."
            return Reading("info", "The reward has stopped rising", evidence, remedy, steps[0])
        remedy = (
            "Read some groups: can the reward be reached, and are the answers parsed? Then try a higher learning rate."
        )
        return Reading("warning", "The reward does not rise", evidence, remedy, steps[0])
