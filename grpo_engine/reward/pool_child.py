"""A scoring process: `python -m grpo_engine.reward.pool_child PARENT FD`. Judges in its main thread. Torch-free.

First message out: {"ready": true}. Then per chunk in: {"config": a reward's config, "given": what its metric takes
besides, "pairs": [{"prompt", "completion"} …]}; out, before the first chunk of each metric: {"ready": true} when it is
loaded, or {"refused": why it cannot be}; then one message a pair in order: {"said": [value, explanation, span]} or
{"error": what the judge raised}.
"""

from __future__ import annotations

import json
import resource
import socket
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from pydantic import TypeAdapter

from grpo_engine.config_rewards import RewardConfig
from grpo_engine.errors import RewardError
from grpo_engine.lifeline import die_with_parent
from grpo_engine.reward.messages import PeerGone, receive, send
from grpo_engine.reward.metric import Judge, Metric
from grpo_engine.types import Completion, Prompt

MEMORY_BYTES = 4 << 30
"""Address space: a formula that needs more fails with MemoryError instead of taking the engine's memory."""

Build = Callable[[dict[str, Any], dict[str, Any]], Judge]


def main(parent: int, descriptor: int, build: Build | None = None) -> None:
    """Judge until the engine closes the connection. `build`: config, given -> judge; None = the metric of its kind."""
    die_with_parent(parent)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    judges: dict[str, Judge] = {}
    with socket.socket(fileno=descriptor) as connection:
        try:
            send(connection, {"ready": True})
            while True:
                chunk = receive(connection)
                name = json.dumps([chunk["config"], chunk["given"]])
                if name not in judges:
                    judges[name] = (build or build_judge)(chunk["config"], chunk["given"])
                    send(connection, {"ready": True})
                for pair in chunk["pairs"]:
                    send(connection, answer(judges[name], pair))
        except RewardError as error:
            send(connection, {"refused": str(error)})
        except PeerGone:
            return


def build_judge(config: dict[str, Any], given: dict[str, Any]) -> Judge:
    """The judge of the metric that the config names by its kind, with what it needs loaded. Raises RewardError."""
    part = TypeAdapter[Any](RewardConfig).validate_python(config)
    metric: Metric = import_module(f"grpo_engine.reward.{part.kind}").metric(part, **given)
    if metric.prepare is not None:
        metric.prepare()
    return metric.judge


def answer(judge: Judge, pair: dict[str, Any]) -> dict[str, Any]:
    prompt, completion = pair["prompt"], pair["completion"]
    try:
        said = judge(
            Prompt(prompt["id"], 0, prompt["text"], [], prompt["columns"]),
            Completion([], completion["text"], completion["finish_reason"], [], []),
        )
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:200]}".rstrip(": ")}
    return {"said": list(said)}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
