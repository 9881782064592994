"""Slots that run jobs side by side, and stay whole whatever the jobs do."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from grpo_engine.config_rewards import SandboxConfig
from grpo_engine.reward.sandbox.jobs import Job, Outcome


class SandboxPool:
    """`config.num_slots` warm servers (None: one a core). Not thread-safe: one caller at a time.

    Slots start with the first job; a slot that fails is replaced before the next job. Raises SandboxRefused (a
    RewardError) at construction when no tier of this host passes the self-test and `unsafe` was not asked for.
    """

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self.num_replaced = 0
        """Slots that had to be started anew."""

    @property
    def tier(self) -> str:
        """How jobs are confined: bubblewrap, landlock or unsafe."""
        raise NotImplementedError

    def run(self, job: Job) -> Outcome:
        """One job. Never raises for what the program does."""
        return self.run_all([job])[0]

    def run_all(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Outcomes in the order of the jobs, as many at a time as there are slots."""
        raise NotImplementedError

    def close(self) -> None:
        """End every process. May be called again; also when the owner dies, the servers end by themselves."""

    def __enter__(self) -> SandboxPool:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()
