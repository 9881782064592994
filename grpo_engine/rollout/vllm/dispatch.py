"""Completions spread over vLLM servers by load, and tried again where a server fails. Runs on one event loop.

A group goes to a server in one request where there is room for all groups: a request costs both sides as much as many
steps of a small model. Else every completion is one of its own, so that it makes room as soon as it ends.

complete ──► the server with the fewest tokens outstanding ──► answer, if the server still holds our weights
    ▲                              │ gone, silent, other weights
    └────────── another ◄──────────┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from grpo_engine.errors import RolloutUnavailable
from grpo_engine.rollout.vllm.client import ServerLost
from grpo_engine.rollout.vllm.members import Member, Members
from grpo_engine.rollout.vllm.outputs import Sampled

ABORTED = "abort"
"""vLLM's finish reason."""
NOTHING = (Sampled([], [], [], None, ABORTED), 0)


@dataclass(frozen=True, slots=True)
class Job:
    """One completion to sample."""

    body: Mapping[str, Any]
    """Of the HTTP request, without seed and cache_salt."""
    seed: int
    group: str
    """Jobs of one group that follow each other share their prompt: one server computes it for all of them."""
    max_tokens: int

    def follows(self, other: Job) -> bool:
        """One request can ask for both. vLLM refuses greedy ones for several, since those are all the same."""
        return self.seed == other.seed + 1 and self.body == other.body and self.body["temperature"] != 0


Answer = tuple[Sampled, int]
"""What was sampled, and the policy version under which it began."""


class Dispatcher:
    """Gives each server up to `max_rows` completions at once; the others wait here, so that the next goes to whichever
    server has room first. A completion that fails is tried up to `max_attempts` times."""

    def __init__(self, members: Members, *, max_rows: int, max_attempts: int, request_timeout_s: float) -> None:
        self.num_retried = 0
        """Completions given to another server, so far."""
        self._members = members
        self._max_rows = max_rows
        self._max_attempts = max_attempts
        self._request_timeout_s = request_timeout_s
        self._aborting = False

    async def complete(self, jobs: Sequence[Job], only: Member | None = None) -> list[Answer]:
        """One answer a job, in order; from `only` as long as that server is ready, when it is given.

        Raises RolloutUnavailable when no server is left or a job fails everywhere."""
        self._aborting = False
        num_servers = 1 if only else len(self._members.ready)
        split = _runs if len(jobs) <= num_servers * self._max_rows else _singles
        tasks: list[asyncio.Task[list[Answer]]] = []
        try:
            async with asyncio.TaskGroup() as running:
                for bundle in self._bundles(jobs):
                    member = await self._room_for(bundle, only=only)
                    tasks += [running.create_task(self._finish(part, member)) for part in split(bundle)]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [answer for task in tasks for answer in task.result()]

    async def abort(self) -> None:
        """End the calls of `complete` that are running: each job is answered with what was sampled, perhaps nothing."""
        self._aborting = True
        ready = self._members.ready
        await asyncio.gather(*(member.client.abort() for member in ready), return_exceptions=True)

    def _bundles(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """Jobs that go to one server together: a group, cut where that keeps all servers busy."""
        size = -(-len(jobs) // max(1, len(self._members.ready)))
        size = max(1, min(size, self._max_rows))
        groups = [list(group) for _, group in groupby(jobs, key=lambda job: job.group)]
        return [group[start : start + size] for group in groups for start in range(0, len(group), size)]

    async def _room_for(
        self, jobs: Sequence[Job], tried: AbstractSet[Member] = frozenset(), only: Member | None = None
    ) -> Member:
        """The server with the fewest tokens outstanding, now charged with the jobs; one of `tried` only when no other
        is ready. Waits for room. Raises RolloutUnavailable when no server is left."""
        while (member := self._choose(len(jobs), tried, only)) is None:
            await self._members.changed()
        member.num_rows += len(jobs)
        member.num_tokens += sum(job.max_tokens for job in jobs)
        return member

    def _choose(self, num_jobs: int, tried: AbstractSet[Member], only: Member | None) -> Member | None:
        ready = [only] if only is not None and only.ready else self._members.ready
        if not ready:
            self._members.check_hope()
        untried = [member for member in ready if member not in tried] or ready
        free = [m for m in untried if m.num_rows == 0 or m.num_rows + num_jobs <= self._max_rows]
        return min(free, key=lambda member: member.num_tokens, default=None)

    async def _finish(self, jobs: Sequence[Job], member: Member) -> list[Answer]:
        """The answers to one request, of `member` that was charged with the jobs, or of another when that one fails."""
        faults: list[str] = []
        tried: set[Member] = set()
        while True:
            life = member.gone
            try:
                return await self._attempt(jobs, member)
            except ServerLost as error:
                self._members.lose(member, life, str(error))
                faults.append(f"{member.client.address}: {error}")
            finally:
                member.num_rows -= len(jobs)
                member.num_tokens -= sum(job.max_tokens for job in jobs)
                self._members.notify()
            if len(faults) == self._max_attempts:
                tries = f"a completion failed {len(faults)} times, which is rollout.max_attempts"
                raise RolloutUnavailable(f"{tries}: {'; '.join(faults)}")
            tried.add(member)
            self.num_retried += len(jobs)
            member = await self._room_for(jobs, tried)

    async def _attempt(self, jobs: Sequence[Job], member: Member) -> list[Answer]:
        """Raises ServerLost as soon as the member is lost, whoever noticed it."""
        if self._aborting:
            return [NOTHING] * len(jobs)
        weights = member.weights
        if weights is None:
            raise ServerLost(member.fault)
        # What older weights left in the cache is not used again.
        body = {**jobs[0].body, "seed": jobs[0].seed, "cache_salt": weights.version}
        answer = asyncio.create_task(member.client.complete(body, len(jobs), self._request_timeout_s))
        gone = asyncio.create_task(member.gone.wait())
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ServerLost(member.fault)
            sampled = answer.result()
        finally:
            answer.cancel()
            gone.cancel()
            await asyncio.gather(answer, gone, return_exceptions=True)
        if any(one.finish == ABORTED for one in sampled) and not self._aborting:
            raise ServerLost("somebody else aborted its completions")
        await self._members.check_version(member)
        return [(one, weights.policy_version) for one in sampled]


def _runs(jobs: Sequence[Job]) -> list[list[Job]]:
    """Jobs that one request can ask for, together."""
    runs: list[list[Job]] = []
    for job in jobs:
        if runs and job.follows(runs[-1][-1]):
            runs[-1].append(job)
        else:
            runs.append([job])
    return runs


def _singles(jobs: Sequence[Job]) -> list[list[Job]]:
    return [[job] for job in jobs]
