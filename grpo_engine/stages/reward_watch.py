"""Watch what the policy earns: notice that it has lost much of the best it earned. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

LOW_BATCHES = 2
"""Batches in a row, each of them low, that make a collapse: one that comes at once."""
POOLED_BATCHES = 4
"""Newest batches that make a collapse when their common mean is low: one that slides, hidden in each batch's doubt."""
DOUBT = 2.0
"""Standard errors by which a mean reward may be off."""


@dataclass(frozen=True, slots=True)
class BatchReward:
    """What the policy earned on one batch, before it was trained on."""

    mean: float
    error: float
    """Standard error of the mean, from the means of its groups."""

    @property
    def lowest(self) -> float:
        """What the policy earns at least, beyond doubt."""
        return self.mean - DOUBT * self.error

    @property
    def highest(self) -> float:
        return self.mean + DOUBT * self.error


def pooled(rewards: Sequence[BatchReward]) -> BatchReward:
    """Of independent batches, each counted alike."""
    count = len(rewards)
    return BatchReward(
        sum(reward.mean for reward in rewards) / count,
        math.sqrt(sum(reward.error**2 for reward in rewards)) / count,
    )


@dataclass(slots=True)
class RewardWatch:
    """The best reward of a stage, and whether the newest ones fall short of it. `add` once a batch."""

    max_drop: float | None
    """Share of the best height above `floor` that may be lost; None = nothing is watched."""
    floor: float = 0.0
    """The least that the reward's parts can give."""
    best: float | None = None
    """Highest mean reward of a batch, its doubt taken off."""
    recent: list[BatchReward] = field(default_factory=list)
    """Of the newest POOLED_BATCHES batches."""
    low_batches: int = 0
    """Batches in a row that earned far less than the best."""

    def add(self, reward: BatchReward) -> None:
        if self.max_drop is None:
            return
        self.best = reward.lowest if self.best is None else max(self.best, reward.lowest)
        self.recent = [*self.recent, reward][-POOLED_BATCHES:]
        self.low_batches = self.low_batches + 1 if self._is_low(reward) else 0

    @property
    def falls_short(self) -> bool:
        """The policy earns less than it did, by however little: what is saved now is not known to be good."""
        if self.best is None:
            return False
        return min(self.recent[-1].highest, pooled(self.recent).highest) < self.best

    @property
    def collapse(self) -> str | None:
        """In words what was lost, None when nothing was. Lasts until a batch says otherwise."""
        if self.low_batches >= LOW_BATCHES:
            return self._words(self.recent[-1].mean, f"in {self.low_batches} batches running")
        if len(self.recent) == POOLED_BATCHES and self._is_low(mean := pooled(self.recent)):
            return self._words(mean.mean, f"over the last {POOLED_BATCHES} batches")
        return None

    def forget(self) -> None:
        """What comes next is earned by another policy, which may stand lower."""
        self.best, self.recent, self.low_batches = None, [], 0

    def state(self) -> dict[str, Any]:
        """JSON values from which `restore` continues exactly."""
        return {"best": self.best, "recent": [asdict(r) for r in self.recent], "low_batches": self.low_batches}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.best, self.low_batches = state["best"], state["low_batches"]
        self.recent = [BatchReward(**reward) for reward in state["recent"]]

    def _is_low(self, reward: BatchReward) -> bool:
        assert self.best is not None
        assert self.max_drop is not None
        return reward.highest < self.best - self.max_drop * (self.best - self.floor)

    def _words(self, mean: float, when: str) -> str:
        return (
            f"The mean reward is {mean:.3g} {when}, and was at least {self.best:.3g}: beyond doubt more than "
            f"{self.max_drop:.0%} of its height is lost (guards.max_reward_drop)."
        )
