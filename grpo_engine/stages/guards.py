"""Guards: notice that training leaves the rails, tell it as a finding, and say whether to roll back. Torch-free.

KL: the policy's own samples are improbable to the reference (k3 above `max_kl` nats a token). That is measured on the
batch before its update, so an explosion shows one batch after the update that caused it.
Reward: what the policy earns has lost much of the best it earned, beyond doubt, at once or over some batches
(`reward_watch.py`). A policy can collapse within one update while its KL stays below the limit.
Spike: gradient norm or |loss| many times its recent median, in two steps running (a single one is what clipping is
for), and above an absolute floor, since a GRPO loss lives near 0.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_engine.config_training import GuardsConfig
from grpo_engine.stages.reward_watch import BatchReward, RewardWatch
from grpo_engine.types import StepResult

SPIKE_STEPS = 2
"""Steps in a row that make a spike."""
LOSS_FLOOR = 1.0
"""|loss| below this is never a spike."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """Why training is off the rails."""

    detector: str
    """guard_kl, guard_reward, guard_spike or guard_nonfinite."""
    title: str
    evidence: str


COUNTED = ("norms", "losses", "spikes", "rollbacks", "alarmed")
"""Fields of Guards that a checkpoint keeps, beside the reward's."""


@dataclass(slots=True)
class Guards:
    """One stage's guards. `check` once an optimizer step."""

    config: GuardsConfig
    max_gradient_norm: float
    reward: RewardWatch
    norms: list[float] = field(default_factory=list)
    """Of the last spike_window calm steps."""
    losses: list[float] = field(default_factory=list)
    """|loss| of the same steps."""
    spikes: int = 0
    """Steps in a row that looked like a spike."""
    rollbacks: int = 0
    alarmed: bool = False
    """The last step was off the rails: what is saved now is no good checkpoint."""

    def check(
        self, result: StepResult, sampled_kl: float | None = None, reward: BatchReward | None = None
    ) -> Alarm | None:
        """The alarm that begins or goes on at this step, None on the rails.

        `sampled_kl`: KL of the sampled tokens, for a step that trained on nothing: a policy that has collapsed gives
        groups without variance, and must not go unseen for it. `reward`: of the step's batch, once a batch. Skipped
        steps count as neither calm nor spike."""
        if self.config.action == "off":
            return None
        kl = result.stats.get("policy/kl", sampled_kl)
        if reward is not None:
            self.reward.add(reward)
        alarm = self._kl(kl) or self._collapse()
        alarm = alarm or (self._spike(result) if result.applied and result.stats else None)
        if alarm is not None or kl is not None or result.stats:
            self.alarmed = alarm is not None
        return alarm

    @property
    def doubtful(self) -> bool:
        """No alarm yet, but what is saved now is not known to be good."""
        return self.spikes > 0 or self.reward.falls_short

    def rolled_back(self) -> None:
        """Forget what led here: the restored policy has other norms, and may earn less than the best before it."""
        self.rollbacks += 1
        self.spikes = 0
        self.reward.forget()
        self.alarmed = False

    def state(self) -> dict[str, Any]:
        """JSON values from which `restore` continues exactly."""
        return {**{name: getattr(self, name) for name in COUNTED}, "reward": self.reward.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name in set(COUNTED) & set(state):
            value = state[name]
            setattr(self, name, list(value) if isinstance(value, list) else value)
        if "reward" in state:
            self.reward.restore(state["reward"])

    def _kl(self, kl: float | None) -> Alarm | None:
        if kl is None or kl <= self.config.max_kl:
            return None
        evidence = f"{kl:.3g} nats a token, more than guards.max_kl = {self.config.max_kl:g}."
        return Alarm("guard_kl", "The policy has run away from the reference", evidence)

    def _collapse(self) -> Alarm | None:
        """Told for as long as it lasts, also between two batches."""
        lost = self.reward.collapse
        return Alarm("guard_reward", "The reward has collapsed", lost) if lost else None

    def _spike(self, result: StepResult) -> Alarm | None:
        what = self._outlier(result)
        if what is None:
            self.spikes = 0
            self.norms = [*self.norms, result.gradient_norm][-self.config.spike_window :]
            self.losses = [*self.losses, abs(result.stats["loss"])][-self.config.spike_window :]
            return None
        self.spikes += 1
        if self.spikes < SPIKE_STEPS:
            return None
        return Alarm("guard_spike", "Loss or gradient has jumped and stays high", what)

    def _outlier(self, result: StepResult) -> str | None:
        """In words what stands out, None when nothing does."""
        if len(self.norms) < self.config.spike_window:
            return None
        factor = self.config.spike_factor
        usual = statistics.median(self.norms)
        if result.gradient_norm > max(factor * usual, self.max_gradient_norm):
            return f"Gradient norm {result.gradient_norm:.3g}, its median of {len(self.norms)} steps was {usual:.3g}."
        loss, usual = abs(result.stats["loss"]), statistics.median(self.losses)
        if loss > max(factor * usual, LOSS_FLOOR):
            return f"|Loss| {loss:.3g}, its median of {len(self.losses)} steps was {usual:.3g}."
        return None
