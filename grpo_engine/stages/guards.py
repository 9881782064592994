"""Guards: notice that training leaves the rails, tell it as a finding, and say whether to roll back. Torch-free.

KL: the policy's own samples are improbable to the reference (k3 above `max_kl` nats a token). That is measured on the
batch before its update, so an explosion shows one batch after the update that caused it.
Spike: gradient norm or |loss| many times its recent median, in two steps running (a single one is what clipping is
for), and above an absolute floor, since a GRPO loss lives near 0.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from grpo_engine.config_training import GuardsConfig
from grpo_engine.types import StepResult

SPIKE_STEPS = 2
"""Steps in a row that make a spike."""
LOSS_FLOOR = 1.0
"""|loss| below this is never a spike."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """Why training is off the rails."""

    detector: str
    """guard_kl, guard_spike or guard_nonfinite."""
    title: str
    evidence: str


@dataclass(slots=True)
class Guards:
    """One stage's guards. `check` once an optimizer step."""

    config: GuardsConfig
    max_gradient_norm: float
    norms: list[float] = field(default_factory=list)
    """Of the last spike_window calm steps."""
    losses: list[float] = field(default_factory=list)
    """|loss| of the same steps."""
    spikes: int = 0
    """Steps in a row that looked like a spike."""
    rollbacks: int = 0
    alarmed: bool = False
    """The last step was off the rails: what is saved now is no good checkpoint."""

    def check(self, result: StepResult, sampled_kl: float | None = None) -> Alarm | None:
        """The alarm that begins or goes on at this step, None on the rails.

        `sampled_kl`: KL of the sampled tokens, for a step that trained on nothing: a policy that has collapsed gives
        groups without variance, and must not go unseen for it. Skipped steps count as neither calm nor spike."""
        kl = result.stats.get("policy/kl", sampled_kl)
        if self.config.action == "off" or (kl is None and not result.stats):
            return None
        alarm = self._kl(kl) or (self._spike(result) if result.applied and result.stats else None)
        self.alarmed = alarm is not None
        return alarm

    def rolled_back(self) -> None:
        """Forget what led here: the restored policy has other norms."""
        self.rollbacks += 1
        self.spikes = 0
        self.alarmed = False

    def state(self) -> dict[str, Any]:
        """JSON values from which `restore` continues exactly."""
        values = asdict(self)
        return {name: values[name] for name in ("norms", "losses", "spikes", "rollbacks", "alarmed")}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, list(value) if isinstance(value, list) else value)

    def _kl(self, kl: float | None) -> Alarm | None:
        if kl is None or kl <= self.config.max_kl:
            return None
        evidence = f"{kl:.3g} nats a token, more than guards.max_kl = {self.config.max_kl:g}."
        return Alarm("guard_kl", "The policy has run away from the reference", evidence)

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
