"""Slots that run jobs side by side, and stay whole whatever the jobs do."""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Sequence
from types import TracebackType

from grpo_engine.config_rewards import SandboxConfig
from grpo_engine.reward.sandbox.conduct import Conduct, conduct, lost, refused
from grpo_engine.reward.sandbox.jobs import Job, Outcome
from grpo_engine.reward.sandbox.slot import Reply, Request, Slot, SlotLost
from grpo_engine.reward.sandbox.tiers import Tier

_MAX_TRIES = 2
"""Servers that may end under one job before it counts against its program."""


class _Work:
    """A job on its way."""

    def __init__(self, index: int, job: Job, config: SandboxConfig) -> None:
        self.index = index
        self.job = job
        self.conduct: Conduct = conduct(job, config)
        self.request: Request = next(self.conduct)
        self.num_tries = 0
        self.num_unsent = 0
        """Servers found dead before they had the job."""


class SandboxPool:
    """`config.num_slots` warm servers (None: one a core). Not thread-safe: one caller at a time.

    Slots start with the first jobs; a slot that fails is replaced before the next job.
    """

    def __init__(self, config: SandboxConfig, tier: Tier) -> None:
        self.config = config
        self.tier: Tier = tier
        """How jobs are confined."""
        self.num_slots = config.num_slots or len(os.sched_getaffinity(0))
        self.num_replaced = 0
        """Slots that had to be started anew."""
        self._slots: list[Slot | None] = [None] * self.num_slots
        self._working: dict[int, _Work] = {}
        self._failed_starts = 0

    def run(self, job: Job) -> Outcome:
        """One job. Never raises for what the program does."""
        return self.run_all([job])[0]

    def run_all(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Outcomes in the order of the jobs, as many at a time as there are slots."""
        outcomes: dict[int, Outcome] = {}
        waiting = deque(_Work(index, job, self.config) for index, job in enumerate(jobs))
        try:
            while waiting or self._working:
                self._fill(waiting, outcomes)
                self._wait(waiting, outcomes)
        finally:
            for number in list(self._working):  # only when something else raised
                self._drop(number)
        return [outcomes[index] for index in range(len(jobs))]

    def pids(self) -> list[int]:
        """Of the slots' servers that run."""
        return [slot.pid for slot in self._slots if slot is not None]

    def close(self) -> None:
        """End every process. May be called again; also when the owner dies, the servers end by themselves."""
        for number in range(self.num_slots):
            self._drop(number)

    def __enter__(self) -> SandboxPool:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def _fill(self, waiting: deque[_Work], outcomes: dict[int, Outcome]) -> None:
        """Give every slot that is ready a job, and start slots as long as there are more jobs than slots."""
        wanted = len(waiting) + len(self._working)
        for number, slot in enumerate(self._slots):
            if slot is None and wanted > sum(one is not None for one in self._slots):
                try:
                    self._slots[number] = Slot(self.tier, number, self.config.file_mib << 20)
                except OSError as error:
                    self._refuse_all(waiting, outcomes, str(error))
            elif slot is not None and slot.ready and waiting and number not in self._working:
                self._submit(number, slot, waiting.popleft(), waiting, outcomes)

    def _submit(
        self, number: int, slot: Slot, work: _Work, waiting: deque[_Work], outcomes: dict[int, Outcome]
    ) -> None:
        self._working[number] = work
        try:
            slot.submit(work.request)
        except SlotLost as error:
            # It died while nothing ran in it: that says nothing about the job, as long as slots are left to find dead.
            work.num_unsent += 1
            if work.num_unsent <= self.num_slots:
                work.num_tries -= 1
            self._lose(number, str(error), waiting, outcomes)

    def _wait(self, waiting: deque[_Work], outcomes: dict[int, Outcome]) -> None:
        busy = {number: slot for number, slot in enumerate(self._slots) if slot is not None and not slot.ready}
        if not busy:
            return
        poll = select.poll()
        for slot in busy.values():
            for descriptor in slot.descriptors():
                poll.register(descriptor, select.POLLIN)
        left_s = min(slot.seconds_left() for slot in busy.values())
        poll.poll(max(0.0, left_s) * 1000 + 1)
        for number, slot in busy.items():
            try:
                reply = slot.read()
                if reply is None and slot.seconds_left() <= 0:
                    raise SlotLost("it did not answer in time")
            except SlotLost as error:
                self._lose(number, str(error), waiting, outcomes)
                continue
            if reply is not None:
                self._go_on(number, slot, reply, waiting, outcomes)

    def _go_on(
        self, number: int, slot: Slot, reply: Reply, waiting: deque[_Work], outcomes: dict[int, Outcome]
    ) -> None:
        work = self._working.pop(number)
        self._failed_starts = 0
        try:
            work.request = work.conduct.send(reply)
        except StopIteration as through:
            outcomes[work.index] = through.value
        else:
            self._submit(number, slot, work, waiting, outcomes)

    def _lose(self, number: int, message: str, waiting: deque[_Work], outcomes: dict[int, Outcome]) -> None:
        """A slot is lost: its job is tried again from the beginning, elsewhere."""
        work = self._working.get(number)
        self._drop(number)
        self.num_replaced += 1
        if work is not None:
            work.num_tries += 1
            if work.num_tries >= _MAX_TRIES:
                outcomes[work.index] = lost(message)
                return
            again = _Work(work.index, work.job, self.config)
            again.num_tries, again.num_unsent = work.num_tries, work.num_unsent
            waiting.appendleft(again)
            return
        self._failed_starts += 1
        if self._failed_starts >= _MAX_TRIES:
            self._refuse_all(waiting, outcomes, f"a sandbox slot did not start: {message}")

    def _refuse_all(self, waiting: deque[_Work], outcomes: dict[int, Outcome], message: str) -> None:
        while waiting:
            outcomes[waiting.popleft().index] = refused(message)

    def _drop(self, number: int) -> None:
        slot, self._slots[number] = self._slots[number], None
        self._working.pop(number, None)
        if slot is not None:
            slot.stop()
