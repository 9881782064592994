"""Early stopping: what the rule sees, whether it would stop, and state that survives a resume. Torch-free."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from grpo_engine.config import EarlyStoppingConfig
from grpo_engine.diagnostics.trend import robust_trend

Mode = Literal["off", "observe", "stop"]

SMOOTHING = 0.9
"""s_t = 0.9 s_{t-1} + 0.1 r_t, s_1 = r_1."""
SPAN = 5
"""The literal rule compares s_t with s_{t-5}."""
SMALLEST_LEVEL = 0.1
"""Improvements are relative to the reward's level, but never to less than this."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One step's outcome, with the fields of the journal's `early_stopping` event."""

    step: int
    rule: Literal["literal", "plateau"]
    mode: Mode
    armed: bool
    smoothed_reward: float
    improvement: float | None
    threshold: float
    patience: int
    patience_left: int
    would_stop: bool

    @property
    def stops(self) -> bool:
        """Whether the run ends here: the rule says so and the mode lets it."""
        return self.would_stop and self.mode == "stop"

    def fields(self) -> dict[str, Any]:
        """Payload of the journal event: `journal.append("early_stopping", stage=..., **decision.fields())`."""
        return asdict(self)


class EarlyStopper:
    """Follows the mean reward of a stage, one `update` a step.

    literal: improvement_t = (s_t - s_{t-5}) / max(|s_{t-5}|, 0.1) of the smoothed reward.
    plateau: upper confidence bound of the Theil-Sen slope of the raw rewards over the last `window_steps` steps, times
        the steps of the window, over max(|median reward|, 0.1): the most that the reward can have risen.

    A step counts against `patience` when the rule is armed (step > warmup_steps), has enough steps to compare, and
    improvement < min_improvement; any better step starts the count anew. A step without a finite reward is passed over:
    it neither counts nor starts anew. `mode` may be set at any time and is part of the state.
    """

    def __init__(self, config: EarlyStoppingConfig) -> None:
        self.mode: Mode = config.mode
        self._config = config
        self._smoothed: list[float] = []  # the newest SPAN + 1 values
        self._rewards: list[tuple[int, float]] = []  # the newest window_steps of (step, reward)
        self._weak_steps = 0

    def override(self, mode: Mode | None) -> None:
        """What the operator wants; None is the config's mode."""
        self.mode = mode or self._config.mode

    def update(self, step: int, mean_reward: float | None) -> Decision | None:
        """The decision after `step`; None while no finite reward was seen at all."""
        if mean_reward is not None and math.isfinite(mean_reward):
            self._observe(step, mean_reward)
            self._count(step)
        return self._decision(step) if self._smoothed else None

    def _observe(self, step: int, reward: float) -> None:
        previous = self._smoothed[-1] if self._smoothed else reward
        smoothed = SMOOTHING * previous + (1 - SMOOTHING) * reward if self._smoothed else reward
        self._smoothed = [*self._smoothed, smoothed][-(SPAN + 1) :]
        self._rewards = [*self._rewards, (step, reward)][-self._config.window_steps :]

    def _count(self, step: int) -> None:
        improvement = self._improvement()
        weak = improvement is not None and improvement < self._config.min_improvement
        self._weak_steps = self._weak_steps + 1 if weak and self._armed(step) else 0

    def _armed(self, step: int) -> bool:
        return step > self._config.warmup_steps

    def _improvement(self) -> float | None:
        return self._literal() if self._config.rule == "literal" else self._plateau()

    def _literal(self) -> float | None:
        if len(self._smoothed) <= SPAN:
            return None
        return (self._smoothed[-1] - self._smoothed[0]) / max(abs(self._smoothed[0]), SMALLEST_LEVEL)

    def _plateau(self) -> float | None:
        if len(self._rewards) < self._config.window_steps:
            return None
        steps = [step for step, _ in self._rewards]
        rewards = [reward for _, reward in self._rewards]
        trend = robust_trend(steps, rewards, self._config.confidence)
        middle = sorted(rewards)[len(rewards) // 2]
        return trend.upper * (steps[-1] - steps[0]) / max(abs(middle), SMALLEST_LEVEL)

    def _decision(self, step: int) -> Decision:
        config = self._config
        return Decision(
            step=step,
            rule=config.rule,
            mode=self.mode,
            armed=self._armed(step),
            smoothed_reward=self._smoothed[-1],
            improvement=self._improvement(),
            threshold=config.min_improvement,
            patience=config.patience,
            patience_left=max(config.patience - self._weak_steps, 0),
            would_stop=self._weak_steps >= config.patience,
        )

    def state(self) -> dict[str, Any]:
        """JSON values from which `restore` continues exactly."""
        return {
            "mode": self.mode,
            "smoothed": list(self._smoothed),
            "rewards": [list(pair) for pair in self._rewards],
            "weak_steps": self._weak_steps,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state()`; an empty state starts fresh."""
        if not state:
            return
        self.mode = state["mode"]
        self._smoothed = [float(value) for value in state["smoothed"]]
        self._rewards = [(int(step), float(reward)) for step, reward in state["rewards"]]
        self._weak_steps = int(state["weak_steps"])
