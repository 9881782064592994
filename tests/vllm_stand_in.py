"""A stand-in that speaks vLLM's endpoints: in a thread (`StandIn`) or as a process (`python -m tests.vllm_stand_in`).

It "samples" as many tokens as it is allowed, all of them 3 + seed % 5, with the log-probability -0.25. Of several
completions of one request, each has the next seed.
"""

from __future__ import annotations

import json
import math
import os
import socketserver
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from safetensors import deserialize

from grpo_engine.control import PARENT_PID
from grpo_engine.lifeline import die_with_parent

LOGPROB = -0.25


class _Threads(socketserver.ThreadingMixIn):
    daemon_threads = True
    request_queue_size = 256
    owner: StandIn

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections break off in these tests."""


class _TCPServer(_Threads, socketserver.TCPServer):
    """At an address."""


class _UnixServer(_Threads, socketserver.UnixStreamServer):
    """At a socket file."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self._answer(json.loads(self.rfile.read(length)) if length else {})

    def _answer(self, body: dict[str, Any]) -> None:
        owner: StandIn = self.server.owner  # type: ignore[attr-defined]
        status, told = owner.answer(self.path, body)
        if status == 0:
            self.close_connection = True
            return
        data = (told if isinstance(told, str) else json.dumps(told)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


class StandIn:
    """One server. `calls` are the paths asked for, in order, health and version left out."""

    def __init__(self, socket_path: Path | None = None) -> None:
        self.alive = True
        self.refuses: dict[str, tuple[int, dict[str, Any]]] = {}
        """Path -> status and body that it is answered with instead."""
        self.version: str | None = None
        self.weights: dict[str, bytes] = {}
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        """Of the completions asked for, one each with its own seed."""
        self.logprob = LOGPROB
        self.metrics = ""
        """Prometheus' text."""
        self.open = threading.Event()
        """Completions are answered while it is set."""
        self.open.set()
        self._server: _TCPServer | _UnixServer
        if socket_path is None:
            self._server = _TCPServer(("127.0.0.1", 0), _Handler)
            self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        else:
            self._server = _UnixServer(str(socket_path), _Handler)
        self._server.owner = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any] | str]:
        """Status and body; status 0 breaks the connection off."""
        path = path.partition("?")[0] if path != "/pause?mode=keep" else path
        if path not in ("/health", "/weight_info", "/v1/models", "/metrics"):
            self.calls.append(path)
        if not self.alive:
            return 0, {}
        if path in self.refuses:
            return self.refuses[path]
        if path == "/v1/completions":
            each = [body | {"seed": body["seed"] + index} for index in range(body["n"])]
            self.bodies += each
            self.open.wait()
            choices = [self._choice(one) | {"index": index} for index, one in enumerate(each)]
            return (200, {"choices": choices}) if self.alive else (0, {})
        if path == "/update_weights":
            content = Path(body["update_info"]["path"]).read_bytes()
            self.weights = {name: bytes(tensor["data"]) for name, tensor in deserialize(content)}  # type: ignore[no-untyped-call]
        if path == "/finish_weight_update":
            self.version = body["weight_version"]
        if path == "/metrics":
            return 200, self.metrics
        if path == "/weight_info":
            return 200, {"weight_version": self.version}
        return 200, {"data": [{"max_model_len": 64}]} if path == "/v1/models" else {}

    def die(self) -> None:
        self.alive = False
        self.open.set()

    def start_again(self) -> None:
        self.alive, self.version, self.weights = True, None, {}

    def stop(self) -> None:
        self.die()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _choice(self, body: dict[str, Any]) -> dict[str, Any]:
        token = 3 + body["seed"] % 5
        length = body["max_tokens"]
        step = {f"token_id:{token}": self.logprob}
        if body["logprobs"]:  # kept: the token and its neighbour, which had 80 % together; removed: token 0
            step |= {"token_id:0": 1 - math.log(0.8), f"token_id:{token + 1}": math.log(1 - math.exp(self.logprob))}
        logprobs = {"token_logprobs": [self.logprob] * length, "top_logprobs": [step] * length}
        return {"token_ids": [token] * length, "finish_reason": "length", "stop_reason": None, "logprobs": logprobs}


def main() -> None:
    if PARENT_PID in os.environ:
        die_with_parent(int(os.environ[PARENT_PID]))
    StandIn(Path(sys.argv[sys.argv.index("--uds") + 1]))
    threading.Event().wait()


if __name__ == "__main__":
    main()
