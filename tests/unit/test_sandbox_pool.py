"""How often a job is tried again whose server ends, on slots that are stand-ins."""

from __future__ import annotations

import itertools

import pytest

from grpo_engine.config_rewards import SandboxConfig
from grpo_engine.reward.sandbox import pool
from grpo_engine.reward.sandbox.jobs import ProgramJob
from grpo_engine.reward.sandbox.slot import Request, SlotLost


class Ending:
    """A slot whose server ends under its job, or before it has it."""

    pid = 1

    def __init__(self, before: bool) -> None:
        self.ready, self._before = True, before

    def submit(self, request: Request) -> None:
        if self._before:
            raise SlotLost("it was dead")
        self.ready = False

    def read(self) -> None:
        raise SlotLost("it ended")

    def seconds_left(self) -> float:
        return 0.0

    def descriptors(self) -> list[int]:
        return []

    def stop(self) -> None:
        self.ready = False


@pytest.mark.parametrize(("before", "servers", "said"), [(False, 2, "it ended"), (True, 3, "it was dead")])
def test_a_job_is_given_up_after_two_servers_besides_one_found_dead_for_each_slot(
    before: bool, servers: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = itertools.count(1)

    def start(*_: object) -> Ending:
        assert next(numbers) <= servers
        return Ending(before)

    monkeypatch.setattr(pool, "Slot", start)
    made = pool.SandboxPool(SandboxConfig(num_slots=1), "landlock")
    told = made.run(ProgramJob(""))
    assert (told.end, told.error, made.num_replaced) == (
        "crashed",
        f"the sandbox's server ended with it: {said}",
        servers,
    )
