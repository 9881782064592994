"""vLLM servers in memory, and a pool of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from grpo_engine.rollout.vllm.client import ServerLost
from grpo_engine.rollout.vllm.dispatch import Dispatcher, Job
from grpo_engine.rollout.vllm.members import Member, Members, Weights
from grpo_engine.rollout.vllm.outputs import Sampled


class FakeServer:
    """A vLLM server in memory. It answers with its seed as the only token, and the next seeds where it is asked for
    several completions."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.alive = True
        self.version: str | None = None
        self.served: list[int] = []
        self.requests: list[int] = []
        """How many completions each asked for."""
        self.salts: list[str] = []
        self.num_rows = self.most_rows = 0
        self.finish = "length"
        self.open = asyncio.Event()
        self.open.set()

    async def check_health(self) -> None:
        if not self.alive:
            raise ServerLost("connection refused")

    async def weight_version(self) -> str | None:
        await self.check_health()
        await asyncio.sleep(0.001)
        return self.version

    async def await_version(self, version: str) -> None:
        while await self.weight_version() != version:
            await asyncio.sleep(0)

    async def load(self, path: str, version: str) -> None:
        await self.check_health()
        await asyncio.sleep(0)
        self.version = version

    async def max_model_len(self) -> int:
        return 64

    async def abort(self) -> None:
        self.finish = "abort"
        self.open.set()

    def forget(self) -> None:
        pass

    async def complete(self, body: dict[str, Any], count: int, timeout_s: float) -> list[Sampled]:
        await self.check_health()
        self.requests.append(count)
        self.num_rows += count
        self.most_rows = max(self.most_rows, self.num_rows)
        self.salts.append(body["cache_salt"])
        try:
            await asyncio.sleep(0.001)
            await self.open.wait()
            await self.check_health()
        finally:
            self.num_rows -= count
        seeds = range(body["seed"], body["seed"] + count)
        self.served += seeds
        return [Sampled([seed], [-0.5], [-0.5], None, self.finish) for seed in seeds]

    def start_again(self) -> None:
        self.alive, self.version = True, None


class Pool:
    """Two fake servers, or as many as named, with the first weights loaded."""

    def __init__(self, names: str = "ab", **limits: Any) -> None:
        self.servers = [FakeServer(name) for name in names]
        self.list = [Member(server) for server in self.servers]  # type: ignore[arg-type]
        self.members = Members(self.list, health_interval_s=0.01, patience_s=0.2, start_timeout_s=0.2)
        told = {"max_rows": 100, "max_attempts": 3, "request_timeout_s": 5.0} | limits
        self.dispatcher = Dispatcher(self.members, **told)

    async def start(self) -> None:
        await self.members.start()
        await self.members.update(Weights("/w", "v1", 1))

    async def complete(self, jobs: Sequence[Job]) -> list[int]:
        return [sampled.token_ids[0] for sampled, _ in await self.dispatcher.complete(jobs)]


def run(test: Callable[[Pool], Awaitable[None]], names: str = "ab", **limits: Any) -> None:
    """Run the test on a started pool whose health is watched."""

    async def main() -> None:
        pool = Pool(names, **limits)
        await pool.start()
        watch = asyncio.create_task(pool.members.watch())
        try:
            async with asyncio.timeout(5):
                await test(pool)
        finally:
            watch.cancel()

    asyncio.run(main())


def jobs(count: int, group: str = "0", max_tokens: int = 10, first: int = 0) -> list[Job]:
    body = {"logprobs": 0, "temperature": 1.0}
    return [Job(body, first + index, group, max_tokens) for index in range(count)]


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)
