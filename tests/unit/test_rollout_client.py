"""One server over HTTP: what its answers mean, and what its silence does. The server is a small one of aiohttp."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from grpo_engine.errors import NonFinite
from grpo_engine.rollout.vllm.client import NOT_JSON, RequestRefused, ServerClient, ServerLost, UpdateFailed
from grpo_engine.rollout.vllm.outputs import Sampled

BODY = {"prompt": [5, 6], "seed": 40, "logprobs": 0}
Talk = Callable[[ServerClient], Awaitable[Any]]


class Server:
    """Answers with `answers` by path, else with an empty object, and remembers what it was asked."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, Any]] = []
        self.open = self.most_open = 0

    async def handle(self, request: web.Request) -> web.Response:
        self.asked.append((request.path_qs, await request.json() if request.can_read_body else None))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        answer = self.answers.get(request.path, {})
        if callable(answer):
            answer = await answer(self)
        self.open -= 1
        return answer if isinstance(answer, web.Response) else web.json_response(answer)

    def talk(self, folder: Path, *talks: Talk) -> list[Any]:
        """What the talks return, held at once on a socket file in `folder`."""

        async def main() -> list[Any]:
            application = web.Application()
            application.router.add_route("*", "/{path:.*}", self.handle)
            runner = web.AppRunner(application, handler_cancellation=True)
            await runner.setup()
            await web.UnixSite(runner, str(folder / "socket"), backlog=1024).start()
            client = ServerClient(f"unix:{folder / 'socket'}")
            try:
                return await asyncio.gather(*(talk(client) for talk in talks))
            finally:
                await client.close()
                await runner.cleanup()

        return asyncio.run(main())


def choice(index: int, tokens: Sequence[int], finish: str = "length") -> dict[str, Any]:
    values = {"token_logprobs": [-token / 10 for token in tokens]}
    return {"index": index, "token_ids": tokens, "logprobs": values, "finish_reason": finish}


def complete(count: int = 1, timeout_s: float = 5.0) -> Talk:
    return lambda client: client.complete(BODY, count, timeout_s)


def status(code: int, text: str = "it says so", **headers: str) -> web.Response:
    return web.Response(status=code, text=text, headers=headers)


def test_completions_of_one_request_come_in_the_order_of_their_seeds(tmp_path: Path) -> None:
    server = Server({"/v1/completions": {"choices": [choice(1, [3]), choice(0, [1, 2], "stop")]}})
    assert server.talk(tmp_path, complete(2)) == [
        [Sampled([1, 2], [-0.1, -0.2], [-0.1, -0.2], None, "stop"), Sampled([3], [-0.3], [-0.3], None, "length")]
    ]
    [(path, body)] = server.asked
    assert path == "/v1/completions"
    assert body == {**BODY, "n": 2, "return_token_ids": True, "return_tokens_as_token_ids": True}


def test_requests_do_not_wait_for_each_other(tmp_path: Path) -> None:
    async def answer(server: Server) -> dict[str, Any]:
        while server.most_open < 150:
            await asyncio.sleep(0.001)
        return {"choices": [choice(0, [1])]}

    server = Server({"/v1/completions": answer})
    assert len(server.talk(tmp_path, *[complete(timeout_s=30.0)] * 150)) == 150


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (status(500), ServerLost, "/v1/completions was answered with status 500: it says so"),
        (status(404), RequestRefused, "unix:.*socket /v1/completions was answered with status 404: it says so"),
        (status(307, Location="/health"), RequestRefused, "status 307"),
        (status(500, f"ValueError: Out of range float values are {NOT_JSON}"), NonFinite, "not finite"),
        (status(200, "<html>"), RequestRefused, "does not answer as vLLM does .*<html>"),
        ({"choices": []}, RequestRefused, "0 choices where 1 were asked for"),
        ({"choices": [choice(1, [3])]}, RequestRefused, "1 choices where 1 were asked for"),
        ({"choices": [{"index": 0}]}, RequestRefused, "KeyError"),
    ],
)
def test_an_answer_that_is_none_is_told_in_words(
    tmp_path: Path, answer: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.compile(message, re.DOTALL)):
        Server({"/v1/completions": answer}).talk(tmp_path, complete())


def test_a_server_that_does_not_answer_in_time_is_lost(tmp_path: Path) -> None:
    async def hang(server: Server) -> None:
        await asyncio.sleep(60)

    with pytest.raises(ServerLost, match=r"no answer to /v1/completions within 0\.05 s"):
        Server({"/v1/completions": hang}).talk(tmp_path, complete(timeout_s=0.05))


@pytest.mark.parametrize("address", ["unix:/nowhere/socket", "http://127.0.0.1:1", "nonsense"])
def test_a_server_that_is_not_there_is_lost(address: str) -> None:
    async def ask() -> None:
        client = ServerClient(address)
        try:
            await client.check_health()
        finally:
            await client.close()

    with pytest.raises(ServerLost, match=r"/health: \w+"):
        asyncio.run(ask())


# ---------------------------------------------------------------- weights
STEPS = [
    "/pause?mode=keep", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights",
    "/finish_weight_update", "/reset_prefix_cache?reset_running_requests=true", "/resume", "/weight_info",
]  # fmt: skip


def load(client: ServerClient) -> Awaitable[None]:
    return client.load("/w.safetensors", "v2")


def test_an_update_pauses_replaces_and_resumes_and_is_confirmed(tmp_path: Path) -> None:
    server = Server({"/weight_info": {"weight_version": "v2"}})
    server.talk(tmp_path, load)
    assert [path for path, _ in server.asked] == STEPS
    assert dict(server.asked)["/update_weights"] == {"update_info": {"path": "/w.safetensors"}}
    assert dict(server.asked)["/finish_weight_update"] == {"weight_version": "v2"}


def test_a_step_that_fails_resumes_what_was_paused(tmp_path: Path) -> None:
    server = Server({"/update_weights": status(500, "no such file")})
    with pytest.raises(UpdateFailed, match="/update_weights was answered with status 500: no such file"):
        server.talk(tmp_path, load)
    assert server.asked[-1][0] == "/resume"


def test_an_update_that_is_not_confirmed_has_failed(tmp_path: Path) -> None:
    with pytest.raises(UpdateFailed, match="it holds weights v1 after an update to v2"):
        Server({"/weight_info": {"weight_version": "v1"}}).talk(tmp_path, load)
