"""Requests to an OpenAI-compatible chat endpoint: several at a time, tried again, within limits of time and money."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from grpo_engine.config_rewards import JudgeReward
from grpo_engine.errors import RewardError

FIRST_WAIT_S = 0.5
"""Longest wait before the second try; it doubles with each try, up to LONGEST_WAIT_S. The wait is drawn between 0 and
that, so that many engines do not knock at the same moment."""
LONGEST_WAIT_S = 20.0
OF_THE_REQUEST = frozenset({400, 413, 422})
"""Statuses that blame one request, such as a text that is too long for the judge; the next may go well."""
LEAST_TRY_S = 1.0
"""A try gets half of the time that is left, but not less than this."""
MAX_REPLY_BYTES = 1 << 20
CHARACTERS_PER_TOKEN = 3
"""A guess on the dear side, where the endpoint does not tell what it used."""
OUTAGE = 4
"""Completions in a row, or max_concurrent if that is more, without any answer: the rest of the batch is not asked."""

Messages = Sequence[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Reply:
    """The text of an answer, and what it took."""

    text: str
    num_requests: int
    cost: float


@dataclass(frozen=True, slots=True)
class Silence:
    """No answer: what happened, in words."""

    kind: str
    """Silences of one kind are told once."""
    message: str
    is_late: bool = False
    is_outage: bool = False
    """The endpoint was at fault, and is likely to fail the next request too."""


class _Failed(Exception):
    """One try."""

    def __init__(
        self, message: str, *, again: bool, kind: str | None = None, wait_s: float | None = None, outage: bool = True
    ) -> None:
        super().__init__(message)
        self.again, self.kind, self.wait_s, self.outage = again, kind or message, wait_s, outage


@dataclass
class Budget:
    """What one rank may spend on one judge in a stage. Answers on their way when the last is spent are still paid."""

    max_requests: int | None
    max_cost: float | None
    num_requests: int = 0
    cost: float = 0.0

    def exhausted(self) -> Silence | None:
        if self.max_requests is not None and self.num_requests >= self.max_requests:
            return Silence("limit of requests", f"The judge's limit of {self.max_requests} requests is reached")
        if self.max_cost is not None and self.cost >= self.max_cost:
            return Silence("limit of cost", f"The judge's limit of cost, {self.max_cost:g}, is reached")
        return None


class JudgeClient:
    """Asks one judge. `key`: the API key, never shown in any message. Raises RewardError when the address is none."""

    def __init__(self, config: JudgeReward, budget: Budget, key: str | None) -> None:
        self.budget = budget
        self._config = config
        self._key = key
        self._random = random.Random()  # the run's own generators must not depend on a judge's failures
        self._silent = 0
        try:
            self._url = httpx.URL(f"{config.base_url.rstrip('/')}/chat/completions")
        except httpx.InvalidURL as error:
            raise RewardError(f"base_url {config.base_url!r} of the judge is no address: {error}") from error
        # Reading the certificates takes longer than a request; without https none is looked at.
        self._verify = httpx.create_ssl_context() if config.base_url.startswith("https") else False

    def ask(self, requests: Sequence[Messages], settle: Callable[[int, Reply | Silence], None]) -> None:
        """`settle(i, …)` is called in this thread as soon as request i is answered or given up."""
        self._silent = 0
        asyncio.run(self._ask_all(requests, settle))

    async def _ask_all(self, requests: Sequence[Messages], settle: Callable[[int, Reply | Silence], None]) -> None:
        config = self._config
        slots = asyncio.Semaphore(config.max_concurrent)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        limits = httpx.Limits(max_connections=config.max_concurrent, max_keepalive_connections=config.max_concurrent)
        async with httpx.AsyncClient(headers=headers, limits=limits, timeout=None, verify=self._verify) as client:

            async def one(index: int) -> None:
                async with slots:
                    answer = await self._answer(client, requests[index])
                settle(index, answer)

            await asyncio.gather(*map(one, range(len(requests))))

    async def _answer(self, client: httpx.AsyncClient, messages: Messages) -> Reply | Silence:
        most = max(OUTAGE, self._config.max_concurrent)
        if self._silent >= most:
            return Silence("outage", f"The judge did not answer {most} requests in a row, so it was not asked")
        answer = await self._tried(client, messages)
        self._silent = self._silent + 1 if isinstance(answer, Silence) and answer.is_outage else 0
        return answer

    async def _tried(self, client: httpx.AsyncClient, messages: Messages) -> Reply | Silence:
        """Until it answers, refuses for good, or the time is over."""
        limit, spent, cost = self._config.time_limit_s, 0, 0.0
        deadline = time.monotonic() + limit
        failed: _Failed | None = None
        while True:
            if silence := self.budget.exhausted():
                return silence
            left = deadline - time.monotonic()
            self.budget.num_requests += 1
            spent += 1
            try:
                async with asyncio.timeout(max(left / 2, min(left, LEAST_TRY_S))):
                    text, price = await self._try(client, messages)
                self.budget.cost += price
                return Reply(text, spent, cost + price)
            except TimeoutError:
                failed = failed or _Failed("no answer in time", again=True)  # what it said before tells more
            except httpx.HTTPError as error:
                failed = _Failed(f"{type(error).__name__}: {self._without_key(str(error))}", again=True)
            except _Failed as error:
                failed = error
            if not failed.again:
                return Silence(failed.kind, f"The judge failed: {failed}", is_outage=failed.outage)
            longest = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (spent - 1))
            wait = self._random.uniform(0, longest) if failed.wait_s is None else failed.wait_s
            if wait >= deadline - time.monotonic():
                message = f"The judge gave no answer within {limit:g} s and {spent} tries; the last: {failed}"
                return Silence("no answer in time", message, is_late=True, is_outage=True)
            await asyncio.sleep(wait)

    async def _try(self, client: httpx.AsyncClient, messages: Messages) -> tuple[str, float]:
        body = {
            "model": self._config.model, "messages": list(messages), "temperature": 0,
            "response_format": {"type": "json_object"},
        }  # fmt: skip
        async with client.stream("POST", self._url, json=body) as response:
            data = bytearray()
            async for piece in response.aiter_bytes():
                data += piece
                if len(data) > MAX_REPLY_BYTES:
                    raise _Failed(f"its reply is longer than {MAX_REPLY_BYTES} bytes", again=False)
        if response.status_code != 200:
            status = f"status {response.status_code}"
            said = self._without_key(bytes(data[:300]).decode("utf-8", "replace")).strip()
            again = response.status_code in (408, 409, 429) or response.status_code >= 500
            outage = response.status_code not in OF_THE_REQUEST
            wait = _retry_after(response)
            raise _Failed(f"{status} {said}".strip(), again=again, kind=status, wait_s=wait, outage=outage)
        return self._read(bytes(data), messages)

    def _read(self, data: bytes, messages: Messages) -> tuple[str, float]:
        """Text and cost of a chat completion."""
        try:
            reply: Any = json.loads(data)
            choice = reply["choices"][0]
            text = choice["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            raise _Failed("its reply is no chat completion", again=False) from None
        usage = reply.get("usage") if isinstance(reply.get("usage"), dict) else {}
        asked = sum(len(turn["content"]) for turn in messages)
        told = text if isinstance(text, str) else ""
        config = self._config
        cost = (
            _count(usage.get("prompt_tokens"), asked) * config.price_per_million_prompt_tokens
            + _count(usage.get("completion_tokens"), len(told)) * config.price_per_million_completion_tokens
        ) / 1e6
        return told, cost

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "[key]") if self._key else text


def _count(tokens: Any, characters: int) -> int:
    told = isinstance(tokens, int) and not isinstance(tokens, bool) and tokens >= 0
    return tokens if told else -(-characters // CHARACTERS_PER_TOKEN)


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds that the endpoint asks to wait; a date is not read."""
    said = response.headers.get("retry-after", "")
    return float(said) if said.isdecimal() and said.isascii() and len(said) < 6 else None
