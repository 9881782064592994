"""A judge behind a real HTTP server on this machine, which says what a test tells it to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

Reply = tuple[int, Any]
"""Status and body: an object as JSON, or bytes as they are."""


class Asked(NamedTuple):
    path: str
    body: dict[str, Any]
    authorization: str | None


class JudgeStub:
    """`reply(n, request)` answers request n, from 0. `most_at_once`: requests that were open at one moment."""

    def __init__(self, reply: Callable[[int, Asked], Reply]) -> None:
        self.reply = reply
        self.asked: list[Asked] = []
        self.most_at_once = 0
        self.lock = threading.Lock()
        self.open = 0
        self.url = ""

    def answer(self, asked: Asked) -> Reply:
        with self.lock:
            number = len(self.asked)
            self.asked.append(asked)
            self.open += 1
            self.most_at_once = max(self.most_at_once, self.open)
        try:
            return self.reply(number, asked)
        finally:
            with self.lock:
                self.open -= 1


def said(text: str, prompt_tokens: int = 100, completion_tokens: int = 10) -> Reply:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage}


def scored(score: Any, reason: str = "clear") -> Reply:
    return said(json.dumps({"score": score, "reason": reason}))


@contextmanager
def judge_stub(reply: Callable[[int, Asked], Reply]) -> Iterator[JudgeStub]:
    stub = JudgeStub(reply)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, payload = stub.answer(Asked(self.path, body, self.headers.get("Authorization")))
            data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except ConnectionError:
                pass  # the client gave up

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    stub.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
