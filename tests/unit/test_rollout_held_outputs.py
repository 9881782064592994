"""Tokens that wait in a server's engine: none is lost, none is late, and what counts something never waits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest

from grpo_engine.rollout.vllm.held_outputs import HOLD_TOKENS, HeldOutputs, joined


class Logprobs(NamedTuple):
    ids: Any
    values: Any
    ranks: Any
    cumulated: Any = None


@dataclass
class Output:
    """As vLLM's EngineCoreOutput."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Logprobs | None = None
    finish_reason: str | None = None
    prefill_stats: str | None = None
    num_nans_in_logits: int = 0
    __struct_fields__ = (
        "request_id", "new_token_ids", "new_logprobs", "finish_reason", "prefill_stats", "num_nans_in_logits",
    )  # fmt: skip


@dataclass
class Stats:
    num_running_reqs: int = 0
    queries: list[int] = field(default_factory=list)


@dataclass
class Message:
    """As vLLM's EngineCoreOutputs."""

    outputs: list[Output] = field(default_factory=list)
    scheduler_stats: Stats | None = None
    timestamp: float = 0.0
    weight_version: str | None = None
    finished_requests: set[str] | None = None
    __struct_fields__ = ("outputs", "scheduler_stats", "timestamp", "weight_version", "finished_requests")


class Engine:
    """Steps of one engine, and what its API server was told."""

    def __init__(self, streamed: str = "") -> None:
        self.told: list[Message] = []
        self.held = HeldOutputs(lambda request: request not in streamed, lambda server, told: self.told.append(told))

    def step(self, *outputs: Output, **more: Any) -> None:
        passed = self.held.pass_on({0: Message(list(outputs), timestamp=1.5, **more)})
        self.told += passed.values()

    @property
    def tokens(self) -> list[tuple[str, list[int]]]:
        return [(output.request_id, output.new_token_ids) for message in self.told for output in message.outputs]


def token(request: str, number: int, width: int = 1, **more: Any) -> Output:
    ids = np.full((1, width), number)
    return Output(request, [number], Logprobs(ids, ids / 10, np.array([0])), **more)


def test_a_completion_goes_over_as_one_when_it_ends() -> None:
    engine = Engine()
    engine.step(token("a", 1), token("b", 7))
    engine.step(token("a", 2), token("b", 8))
    engine.step(token("a", 3, finish_reason="stop"), token("b", 9))
    [output] = engine.told[0].outputs
    assert (len(engine.told), output.new_token_ids, output.finish_reason) == (1, [1, 2, 3], "stop")
    assert output.new_logprobs is not None
    assert [part.tolist() for part in output.new_logprobs[:3]] == [[[1], [2], [3]], [[0.1], [0.2], [0.3]], [0, 0, 0]]


def test_a_long_completion_goes_over_in_parts() -> None:
    engine = Engine()
    for number in range(2 * HOLD_TOKENS + 1):
        engine.step(token("a", number))
    assert engine.tokens == [("a", [*range(HOLD_TOKENS)]), ("a", [*range(HOLD_TOKENS, 2 * HOLD_TOKENS)])]


def test_a_request_that_is_read_as_it_grows_never_waits() -> None:
    engine = Engine(streamed="a")
    engine.step(token("a", 1), token("b", 7))
    assert engine.tokens == [("a", [1])]


@pytest.mark.parametrize("more", [{"prefill_stats": "cached 12"}, {"num_nans_in_logits": 3}])
def test_an_output_that_tells_more_than_tokens_takes_over_what_waits(more: dict[str, Any]) -> None:
    engine = Engine()
    engine.step(token("a", 1))
    engine.step(token("a", 2, **more))
    assert engine.tokens == [("a", [1, 2])]
    assert all(getattr(engine.told[0].outputs[0], name) == value for name, value in more.items())


def test_places_that_kept_different_numbers_of_tokens_go_over_in_order_as_several() -> None:
    parts = joined([token("a", 1, 3), token("a", 2, 3), token("a", 3, 5), token("a", 4, 3), Output("a", [5])])
    assert [part.new_token_ids for part in parts] == [[1, 2], [3], [4], [5]]
    assert [part.new_logprobs and part.new_logprobs.ids.shape for part in parts] == [(2, 3), (1, 5), (1, 3), None]


def test_tokens_without_log_probabilities_are_joined_too() -> None:
    assert [part.new_token_ids for part in joined([Output("a", [1, 2]), Output("a", [3])])] == [[1, 2, 3]]


def test_tokens_of_other_weights_go_before_under_their_own_version() -> None:
    engine = Engine()
    engine.step(token("a", 1), token("b", 7), weight_version="v1")
    engine.step(token("a", 2), weight_version="v2")
    engine.step(token("a", 3, finish_reason="length"), weight_version="v2")
    assert engine.tokens == [("a", [1]), ("b", [7]), ("a", [2, 3])]
    assert [message.weight_version for message in engine.told] == ["v1", "v2"]


def test_servers_are_told_of_their_own_requests() -> None:
    engine = Engine()
    engine.held.pass_on({0: Message([token("a", 1)]), 1: Message([token("b", 7)])})
    passed = engine.held.pass_on({1: Message([token("b", 8, finish_reason="stop")])})
    assert {server: told.outputs[0].new_token_ids for server, told in passed.items()} == {1: [7, 8]}
    engine.held.pass_on({1: Message([token("b", 9)], weight_version="v2")})  # no news for the other
    assert engine.told == []


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({}, 0),
        ({"scheduler_stats": Stats(num_running_reqs=3)}, 0),  # the next step tells it anew
        ({"scheduler_stats": Stats(queries=[12])}, 1),
        ({"finished_requests": {"z"}}, 1),
    ],
)
def test_what_counts_something_goes_over_though_no_token_does(more: dict[str, Any], told: int) -> None:
    engine = Engine()
    engine.step(token("a", 1), **more)
    assert [message.outputs for message in engine.told] == [[]] * told
