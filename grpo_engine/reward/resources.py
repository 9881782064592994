"""What reward parts need besides their own config, and the processes they share: started when needed, then closed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from grpo_engine.config import BertScoreReward, JudgeReward, RewardModelReward, SandboxConfig
from grpo_engine.protocols import RewardFunction
from grpo_engine.reward.pool import RewardPool

if TYPE_CHECKING:
    from grpo_engine.reward.sandbox import SandboxPool

Learned = Callable[[BertScoreReward | RewardModelReward | JudgeReward], RewardFunction]
SANDBOX_RESTARTS = "reward/sandbox_restarts"


@dataclass
class RewardResources:
    """Of one rank. `close` ends every process that was started."""

    custom_sources: Mapping[str, str] = field(default_factory=dict)
    """Registered name -> source text."""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    num_processes: int | None = None
    """Scoring processes, and programs at a time where the sandbox's config does not say; None = one a core. 0: slow
    metrics judge in this process, whose main thread must be the caller's."""
    learned: Learned | None = None
    """Makes the parts that need a model; None where torch must not be loaded."""
    _pool: RewardPool | None = field(default=None, init=False, repr=False)
    _runner: SandboxPool | None = field(default=None, init=False, repr=False)
    _told_restarts: int = field(default=0, init=False, repr=False)

    def pool(self) -> RewardPool | None:
        """For slow metrics; it starts its processes with the first completion."""
        if self._pool is None and self.num_processes != 0:
            self._pool = RewardPool(self._num_processes)
        return self._pool

    def runner(self) -> SandboxPool:
        """For programs. Tries this host first: raises SandboxRefused, a RewardError, where nothing confines them."""
        if self._runner is None:
            from grpo_engine.reward.sandbox import open_pool  # most stages run no program

            slots = self.sandbox.num_slots or max(1, self._num_processes)
            self._runner = open_pool(self.sandbox.model_copy(update={"num_slots": slots}))
        return self._runner

    def take_counts(self) -> dict[str, float]:
        """Processes replaced and completions late, since the last call."""
        counts = self._pool.take_counts() if self._pool is not None else {}
        if self._runner is not None and self._runner.num_replaced > self._told_restarts:
            counts[SANDBOX_RESTARTS] = float(self._runner.num_replaced - self._told_restarts)
            self._told_restarts = self._runner.num_replaced
        return counts

    def close(self) -> None:
        try:
            if self._pool is not None:
                self._pool.close()
        finally:
            if self._runner is not None:
                self._runner.close()

    @property
    def _num_processes(self) -> int:
        return len(os.sched_getaffinity(0)) if self.num_processes is None else self.num_processes
