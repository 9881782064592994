"""The vLLM servers of a pool: which are up, which hold the present weights, which may come back.

    start ──► up ── update ──► ready (is given work) ── gone, silent, other weights ──► lost
                                 ▲                                                        │
                                 └────── present weights ◄── healthy again (watch) ◄──────┘

Everything here runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from grpo_engine.errors import RolloutUnavailable
from grpo_engine.rollout.vllm.client import RequestRefused, ServerClient, ServerLost, UpdateFailed
from grpo_engine.rollout.vllm.counters import Counters, counted
from grpo_engine.rollout.vllm.servers import ServerProcess

START_PAUSE_S = 0.1

log = logging.getLogger("cohort")


@dataclass(frozen=True, slots=True)
class Weights:
    """What servers must hold."""

    path: str
    version: str
    """Unlike that of any other update, of this run or another."""
    policy_version: int


@dataclass(eq=False, slots=True)
class Member:
    """One server of the pool."""

    client: ServerClient
    process: ServerProcess | None = None
    """None: others started it."""
    ours_to_update: bool = True
    """False: another rank, which uses it too, gives it the weights."""
    up: bool = False
    weights: Weights | None = None
    """What it holds, as far as it was given any."""
    fault: str = "it has not answered yet"
    """Why it is not up."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Of its present life: set when that ends."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by an update and by a look at its version."""
    num_checks: int = 0
    """Looks at its version that have begun."""
    num_rows: int = 0
    """Completions outstanding."""
    num_tokens: int = 0
    """The most that they can have."""
    counters: Counters = field(default_factory=dict)
    """As they were last looked at."""
    hope_ends_s: float = 0.0
    """On the loop's clock: until then it may come up again."""

    @property
    def ready(self) -> bool:
        return self.up and self.weights is not None


class Members:
    """A server of others that went may come back within `patience_s`, one of our own within `start_timeout_s`."""

    def __init__(
        self, members: Sequence[Member], *, health_interval_s: float, patience_s: float, start_timeout_s: float
    ) -> None:
        self.all = list(members)
        self._health_interval_s = health_interval_s
        self._patience_s = patience_s
        self._start_timeout_s = start_timeout_s
        self._present: Weights | None = None
        self._changed = asyncio.Event()

    @property
    def ready(self) -> list[Member]:
        """Those that can be given work."""
        return [member for member in self.all if member.ready]

    # ------------------------------------------------------------ start
    async def start(self) -> int | None:
        """Wait until servers answer: every one of our own, at least one of others'. The shortest of their contexts.

        Raises RolloutUnavailable."""
        await asyncio.gather(*(self._await_start(member) for member in self.all))
        down = [member for member in self.all if not member.up]
        if len(down) == len(self.all) or any(member.process is not None for member in down):
            raise RolloutUnavailable(f"no answer from vLLM: {_faults(down)}")
        lengths = [await self._context(member) for member in self.all if member.up]
        return min((length for length in lengths if length is not None), default=None)

    async def _await_start(self, member: Member) -> None:
        clock = asyncio.get_running_loop().time
        deadline_s = clock() + (self._patience_s if member.process is None else self._start_timeout_s)
        while clock() < deadline_s:
            try:
                await member.client.check_health()
            except (ServerLost, RequestRefused) as error:
                member.fault = str(error)
            else:
                member.up = True
                return
            if member.process is not None and member.process.poll() is not None:
                member.fault = member.process.describe_end()
                return
            await asyncio.sleep(START_PAUSE_S)

    async def _context(self, member: Member) -> int | None:
        """Its longest prompt and completion together. RolloutUnavailable when its weights cannot be updated."""
        try:
            await member.client.weight_version()
            return await member.client.max_model_len()
        except (RequestRefused, ServerLost) as error:
            raise RolloutUnavailable(
                f"the server {member.client.address} takes no weight updates ({error}); start it as docs/rollout.md "
                "says, with VLLM_SERVER_DEV_MODE=1 and Cohort's worker extension"
            ) from error

    # ------------------------------------------------------------ weights
    async def update(self, weights: Weights) -> None:
        """Give every server that is up the new weights, all at once; completions in progress go on under them.

        Raises RolloutUnavailable when no server is left."""
        self._present = weights
        faults = await asyncio.gather(*(self._update_one(member) for member in self.all if member.up))
        if faults and all(isinstance(fault, UpdateFailed) for fault in faults):
            raise RolloutUnavailable(f"no vLLM server took the weights: {_faults(self.all)}")
        self.check_hope()

    async def _update_one(self, member: Member) -> Exception | None:
        """What went wrong."""
        life = member.gone
        try:
            await self._load(member)
        except (ServerLost, RequestRefused) as error:
            self.lose(member, life, str(error))
            return error
        return None

    async def _load(self, member: Member) -> None:
        """Until it holds the present weights, which may change meanwhile."""
        async with member.lock:
            while True:
                present = self._present
                assert present is not None
                if member.ours_to_update:
                    await member.client.load(present.path, present.version)
                else:
                    await member.client.await_version(present.version)
                if present is self._present:
                    break
            member.weights = present
        self.notify()

    async def check_version(self, member: Member) -> None:
        """ServerLost unless it still holds the weights it was given. Those who come while one is asking share the next
        answer."""
        seen = member.num_checks
        async with member.lock:
            if member.weights is None:
                raise ServerLost(member.fault)
            if member.num_checks > seen:
                return
            member.num_checks += 1
            held, given = await member.client.weight_version(), member.weights
            if given is None:  # lost while it was asked
                raise ServerLost(member.fault)
            if held != given.version:
                raise ServerLost(f"it holds weights {held}, not {given.version}: it was started again")

    # ------------------------------------------------------------ health
    async def count(self) -> Counters:
        """What the servers that are ready counted since the last call."""
        total: Counter[str] = Counter()
        for member in self.ready:
            try:
                now = await member.client.counters()
            except (ServerLost, RequestRefused):
                continue  # a server is judged by its answers to requests
            total.update(counted(now, member.counters))
            member.counters = now
        return total

    async def watch(self) -> None:
        """Look at every server from time to time, for ever: who went, who is back."""
        while True:
            await asyncio.sleep(self._health_interval_s)
            await asyncio.gather(*(self._look(member) for member in self.all))
            self.notify()

    def lose(self, member: Member, life: asyncio.Event, fault: str) -> None:
        """It gets no more work, and what it has goes elsewhere. Nothing when its life that `life` ends is over."""
        if member.gone is not life or not member.up:
            return
        if member.process is not None:
            if member.process.poll() is not None:
                fault = member.process.describe_end()
            member.process.kill()  # whoever waits for answers starts it again
        self._end_life(member, fault)

    def started_again(self, member: Member, fault: str) -> None:
        """Its process had ended by `fault`, perhaps unnoticed, and was started once more."""
        if member.up:
            self._end_life(member, fault)
        self._hope(member)

    def check_hope(self) -> None:
        """Raises RolloutUnavailable when no server is up and none can be expected to come back."""
        if not any(member.up or self._may_come_back(member) for member in self.all):
            raise RolloutUnavailable(f"no vLLM server is left: {_faults(self.all)}")

    async def changed(self) -> None:
        """Return when something happened that may make room, or end hope."""
        await self._changed.wait()

    def notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _end_life(self, member: Member, fault: str) -> None:
        member.up, member.weights, member.fault = False, None, fault
        self._hope(member)
        member.gone.set()
        log.warning("the vLLM server %s is lost: %s", member.client.address, fault)
        self.notify()

    def _hope(self, member: Member) -> None:
        """From now on it may take this long to come back."""
        wait_s = self._patience_s if member.process is None else self._start_timeout_s
        member.hope_ends_s = asyncio.get_running_loop().time() + wait_s

    @staticmethod
    def _may_come_back(member: Member) -> bool:
        process = member.process
        if process is not None and process.poll() is not None and not process.may_start_again:
            return False
        return asyncio.get_running_loop().time() < member.hope_ends_s

    async def _look(self, member: Member) -> None:
        life = member.gone
        try:
            await member.client.check_health()
            if not member.up:
                await self._revive(member)
            elif member.weights is not None and not member.lock.locked():
                await self.check_version(member)
        except (ServerLost, RequestRefused) as error:
            self.lose(member, life, str(error))

    async def _revive(self, member: Member) -> None:
        member.client.forget()
        if self._present is not None:
            await self._load(member)
        member.gone = asyncio.Event()
        member.up = True
        log.warning("the vLLM server %s is back", member.client.address)


def _faults(members: Sequence[Member]) -> str:
    return "; ".join(f"{member.client.address}: {_fault(member)}" for member in members)


def _fault(member: Member) -> str:
    """The end of its process tells more than the connection that broke by it, which may be noticed first."""
    if member.process is not None and member.process.poll() is not None:
        return member.process.describe_end()
    return member.fault
