"""One vLLM server over HTTP: its endpoints and what its answers mean. Needs no vLLM.

The server is vLLM's own in development mode with our worker extension (see `serve`); facts as of vLLM 0.32. Tokens go
in and come out as ids: no text is encoded again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from grpo_engine.errors import NonFinite
from grpo_engine.rollout.vllm.counters import Counters, read_counters
from grpo_engine.rollout.vllm.outputs import Sampled, read_truncated, read_untruncated

CONNECT_TIMEOUT_S = 5.0
HEALTH_TIMEOUT_S = 30.0
"""A server answers late while it packs many long completions."""
UPDATE_TIMEOUT_S = 600.0
"""For one call of a weight update; the weights of a large model are read in one of them."""
VERSION_PAUSE_S = 0.05
IDLE_S = 3.0
"""An idle connection is closed before the server does so, after 5 s, perhaps just as a request is on its way."""
UNIX = "unix:"
TOKEN = "token_id:"
NOT_JSON = "not JSON compliant"
"""What Python's JSON writer says of NaN; the server answers 500 with it."""

T = TypeVar("T")


class ServerLost(Exception):
    """The server has gone, does not answer in time, or is broken: another may take over its work."""


class UpdateFailed(ServerLost):
    """The server answers, but did not take the weights."""


class RequestRefused(Exception):
    """The server answered that it will not do this; no other of its kind would."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Of a server, read whole."""

    status: int
    body: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")


class ServerClient:
    """Talks to the server at `http://host:port`, or `unix:/path` for a socket of this host; on one event loop.

    aiohttp, because httpx looks at every connection of its pool for every request: with 128 completions at once that
    took more time than two servers' own part in them."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket_path = address.removeprefix(UNIX) if address.startswith(UNIX) else None
        self._base = "http://server" if self._socket_path else address.rstrip("/")
        self._session: aiohttp.ClientSession | None = None
        self._initialised = False

    # ------------------------------------------------------------ sampling
    async def complete(self, body: Mapping[str, object], count: int, timeout_s: float) -> list[Sampled]:
        """`count` completions, the first with the body's seed, each further one with the next. `body` as
        `options.sampling_options` names things, with `prompt` as token ids.

        Raises ServerLost, RequestRefused, NonFinite."""
        form = {"n": count, "return_token_ids": True, "return_tokens_as_token_ids": True}
        answer = await self._ask("POST", "/v1/completions", timeout_s, {**body, **form})
        truncated = body["logprobs"] != 0
        return self._read(answer, lambda told: _all_sampled(told["choices"], count, truncated=truncated))

    async def abort(self) -> None:
        """End everything that is being sampled now; each request is answered with what it has."""
        await self._ask("POST", "/abort_requests", HEALTH_TIMEOUT_S, {})

    # ------------------------------------------------------------ state
    async def check_health(self) -> None:
        """Raises ServerLost."""
        await self._ask("GET", "/health", HEALTH_TIMEOUT_S)

    async def weight_version(self) -> str | None:
        """What the last update called the weights; None for those that it started with."""
        answer = await self._ask("GET", "/weight_info", HEALTH_TIMEOUT_S)
        version: str | None = self._read(answer, lambda told: told["weight_version"])
        return version

    async def max_model_len(self) -> int | None:
        """Longest prompt and completion together; None when the server does not say."""
        answer = await self._ask("GET", "/v1/models", HEALTH_TIMEOUT_S)
        length: int | None = self._read(answer, lambda told: told["data"][0].get("max_model_len"))
        return length

    async def counters(self) -> Counters:
        answer = await self._ask("GET", "/metrics", HEALTH_TIMEOUT_S)
        return read_counters(answer.text)

    # ------------------------------------------------------------ weights
    async def load(self, path: str, version: str) -> None:
        """Take over the weights of the safetensors file at `path`, a path on the server's host.

        Completions in progress pause and go on under the new weights; cached prompts are forgotten. Raises UpdateFailed
        when a step fails or the server does not confirm the version, ServerLost."""
        await self._update("/pause?mode=keep")
        try:
            if not self._initialised:
                await self._update("/init_weight_transfer_engine", {"init_info": {}})
                self._initialised = True
            await self._update("/start_weight_update")
            await self._update("/update_weights", {"update_info": {"path": path}})
            await self._update("/finish_weight_update", {"weight_version": version})
            await self._update("/reset_prefix_cache?reset_running_requests=true")
        finally:
            await self._update("/resume")
        held = await self.weight_version()
        if held != version:
            raise UpdateFailed(f"it holds weights {held} after an update to {version}")

    async def await_version(self, version: str) -> None:
        """Return when another rank has updated the server to `version`. ServerLost when that takes too long."""
        try:
            async with asyncio.timeout(UPDATE_TIMEOUT_S):
                while await self.weight_version() != version:
                    await asyncio.sleep(VERSION_PAUSE_S)
        except TimeoutError as error:
            raise ServerLost(f"nobody updated it to {version} within {UPDATE_TIMEOUT_S:g} s") from error

    def forget(self) -> None:
        """The server may have been started anew."""
        self._initialised = False

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    # ------------------------------------------------------------ HTTP
    def _read(self, answer: Answer, read: Callable[[Any], T]) -> T:
        """RequestRefused for an answer that vLLM would not give."""
        try:
            return read(json.loads(answer.body))
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            said = f"{self.address} does not answer as vLLM does ({error!r}): {_start(answer)}"
            raise RequestRefused(said) from error

    async def _update(self, path: str, body: Mapping[str, object] | None = None) -> None:
        answer = await self._send("POST", path, UPDATE_TIMEOUT_S, body)
        if not answer.is_success:
            raise UpdateFailed(_described(path, answer))

    async def _ask(self, method: str, path: str, timeout_s: float, body: Mapping[str, object] | None = None) -> Answer:
        answer = await self._send(method, path, timeout_s, body)
        if answer.is_success:
            return answer
        if NOT_JSON in answer.text:
            raise NonFinite("vLLM's log-probabilities are not finite; lower the learning rate or check the model")
        said = _described(path, answer)
        raise ServerLost(said) if answer.status >= 500 else RequestRefused(f"{self.address} {said}")

    async def _send(self, method: str, path: str, timeout_s: float, body: Mapping[str, object] | None) -> Answer:
        self._session = self._session or self._open()
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(method, self._base + path, json=body, allow_redirects=False) as answer,
            ):
                return Answer(answer.status, await answer.read())
        except TimeoutError as error:
            raise ServerLost(f"no answer to {path} within {timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise ServerLost(f"{path}: {type(error).__name__} {error}".rstrip()) from error

    def _open(self) -> aiohttp.ClientSession:
        """No limit on connections, and no proxy: nothing stands between an engine and its servers."""
        options: dict[str, Any] = {"limit": 0, "keepalive_timeout": IDLE_S}
        path = self._socket_path
        return aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path, **options) if path else aiohttp.TCPConnector(**options),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
        )


def _described(path: str, answer: Answer) -> str:
    return f"{path} was answered with status {answer.status}: {_start(answer)}"


def _start(answer: Answer) -> str:
    return answer.text[:500]


def _all_sampled(choices: Sequence[Mapping[str, Any]], count: int, *, truncated: bool) -> list[Sampled]:
    """In the order of their seeds. ValueError when some are missing."""
    by_index = {choice["index"]: choice for choice in choices}
    if sorted(by_index) != list(range(count)):
        raise ValueError(f"{len(choices)} choices where {count} were asked for")
    return [_sampled(by_index[index], truncated=truncated) for index in range(count)]


def _sampled(choice: Mapping[str, Any], *, truncated: bool) -> Sampled:
    """A choice of /v1/completions whose tokens are written as `token_id:17`."""
    logprobs, tokens, finish = choice["logprobs"], list(choice["token_ids"]), choice["finish_reason"]
    if not truncated:
        return read_untruncated(tokens, list(logprobs["token_logprobs"]), finish)
    entries = [
        ([int(name.removeprefix(TOKEN)) for name in step], list(step.values())) for step in logprobs["top_logprobs"]
    ]
    return read_truncated(tokens, entries, finish)
