"""One vLLM server over HTTP: its endpoints and what its answers mean. Needs no vLLM.

The server is vLLM's own in development mode with our worker extension (see `serve`); facts as of vLLM 0.32. Tokens go
in and come out as ids: no text is encoded again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import httpx

from grpo_engine.errors import NonFinite
from grpo_engine.rollout.vllm.counters import Counters, read_counters
from grpo_engine.rollout.vllm.outputs import Sampled, read_truncated, read_untruncated

CONNECT_TIMEOUT_S = 5.0
HEALTH_TIMEOUT_S = 30.0
"""A server answers late while it packs many long completions."""
UPDATE_TIMEOUT_S = 600.0
"""For one call of a weight update; the weights of a large model are read in one of them."""
VERSION_PAUSE_S = 0.05
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


class ServerClient:
    """Talks to the server at `http://host:port`, or `unix:/path` for a socket of this host."""

    def __init__(self, address: str) -> None:
        self.address = address
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=60.0)
        path = address.removeprefix(UNIX) if address.startswith(UNIX) else None
        self._http = httpx.AsyncClient(
            base_url="http://server" if path else address,
            transport=httpx.AsyncHTTPTransport(uds=path, limits=limits),
            timeout=timeout,
            trust_env=False,  # no proxy stands between an engine and its servers
        )
        self._initialised = False

    # ------------------------------------------------------------ sampling
    async def complete(self, body: Mapping[str, object], timeout_s: float) -> Sampled:
        """One completion; `body` as `options.sampling_options` names things, with `prompt` as token ids.

        Raises ServerLost, RequestRefused, NonFinite."""
        form = {"n": 1, "return_token_ids": True, "return_tokens_as_token_ids": True}
        answer = await self._ask("POST", "/v1/completions", timeout_s, {**body, **form})
        truncated = body["logprobs"] != 0
        return self._read(answer, lambda told: _sampled(told["choices"][0], truncated=truncated))

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
        await self._http.aclose()

    # ------------------------------------------------------------ HTTP
    def _read(self, answer: httpx.Response, read: Callable[[Any], T]) -> T:
        """RequestRefused for an answer that vLLM would not give."""
        try:
            return read(answer.json())
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            said = f"{self.address} does not answer as vLLM does ({error!r}): {_start(answer)}"
            raise RequestRefused(said) from error

    async def _update(self, path: str, body: Mapping[str, object] | None = None) -> None:
        answer = await self._send("POST", path, UPDATE_TIMEOUT_S, body)
        if not answer.is_success:
            raise UpdateFailed(_described(path, answer))

    async def _ask(
        self, method: str, path: str, timeout_s: float, body: Mapping[str, object] | None = None
    ) -> httpx.Response:
        answer = await self._send(method, path, timeout_s, body)
        if answer.is_success:
            return answer
        if NOT_JSON in answer.text:
            raise NonFinite("vLLM's log-probabilities are not finite; lower the learning rate or check the model")
        said = _described(path, answer)
        raise ServerLost(said) if answer.is_server_error else RequestRefused(f"{self.address} {said}")

    async def _send(
        self, method: str, path: str, timeout_s: float, body: Mapping[str, object] | None
    ) -> httpx.Response:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._http.request(method, path, json=body)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise ServerLost(f"no answer to {path} within {timeout_s:g} s") from error
        except httpx.TransportError as error:
            raise ServerLost(f"{path}: {type(error).__name__} {error}".rstrip()) from error


def _described(path: str, answer: httpx.Response) -> str:
    return f"{path} was answered with status {answer.status_code}: {_start(answer)}"


def _start(answer: httpx.Response) -> str:
    return answer.text[:500]


def _sampled(choice: Mapping[str, Any], *, truncated: bool) -> Sampled:
    """A choice of /v1/completions whose tokens are written as `token_id:17`."""
    logprobs, tokens, finish = choice["logprobs"], list(choice["token_ids"]), choice["finish_reason"]
    if not truncated:
        return read_untruncated(tokens, list(logprobs["token_logprobs"]), finish)
    entries = [
        ([int(name.removeprefix(TOKEN)) for name in step], list(step.values())) for step in logprobs["top_logprobs"]
    ]
    return read_truncated(tokens, entries, finish)
