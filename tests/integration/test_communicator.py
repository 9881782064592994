"""Ranks exchange objects and tensors: in real processes over gloo, also when one of them dies."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from typing import Any

import pytest
import torch

from grpo_engine.communicator import ProcessRanks, SingleRank, is_broken_collective, join
from grpo_engine.errors import BrokenCollective
from grpo_engine.launch import RENDEZVOUS_FD
from tests.distributed import end_ranks, run_ranks

ONE_TO_FIVE = [1.0, 2.0, 3.0, 4.0, 5.0]


def test_one_rank_alone_needs_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    alone, tensor = join("cpu"), torch.ones(2)
    alone.sum_([tensor])
    alone.max_(tensor)
    alone.leave()

    assert isinstance(alone, SingleRank)
    assert not torch.distributed.is_initialized()
    assert (alone.gather("a"), alone.from_first("b"), tensor.tolist()) == (["a"], "b", [1.0, 1.0])


def exchange(ranks: ProcessRanks) -> tuple[Any, ...]:
    own: dict[str, Any] = {"rank": ranks.rank, "rows": list(range(1000 * ranks.rank))}
    gathered = ranks.gather(own)
    return [each["rank"] for each in gathered], len(gathered[2]["rows"]), ranks.from_first(own)["rank"]


def test_objects_arrive_in_rank_order_and_the_first_rank_decides() -> None:
    assert run_ranks(exchange, 3) == [([0, 1, 2], 2000, 0)] * 3


def add_up(ranks: ProcessRanks) -> tuple[list[float], bytes, str]:
    generator = torch.Generator().manual_seed(ranks.rank)
    noise = torch.randn(10_007, generator=generator)
    count = torch.tensor([1, ranks.rank])
    ranks.sum_([noise, count])
    return count.tolist(), noise.numpy().tobytes(), str(count.dtype)


def test_sums_have_the_same_bits_on_every_rank() -> None:
    results = run_ranks(add_up, 3)
    expected = sum(torch.randn(10_007, generator=torch.Generator().manual_seed(rank)) for rank in range(3))

    assert len({bits for _, bits, _ in results}) == 1
    torch.testing.assert_close(torch.frombuffer(bytearray(results[0][1]), dtype=torch.float32), expected)
    assert [(count, dtype) for count, _, dtype in results] == [([3, 3], "torch.int64")] * 3


def add_up_views(ranks: ProcessRanks) -> list[Any]:
    whole = torch.ones(4, 4)
    every_second, transposed = whole[0, ::2], whole[1:].t()
    ranks.sum_([every_second, transposed, torch.zeros(0)])
    return whole.tolist()


def test_views_of_a_tensor_are_added_up_in_place() -> None:
    assert run_ranks(add_up_views, 2) == [[[2.0, 1.0, 2.0, 1.0], *[[2.0] * 4] * 3]] * 2


def add_up_a_parameter(ranks: ProcessRanks) -> tuple[list[list[float]], str]:
    parameter = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16).t())
    ranks.sum_([parameter])
    return parameter.tolist(), str(parameter.grad_fn)


def test_a_parameter_is_added_up_outside_the_graph() -> None:
    assert run_ranks(add_up_a_parameter, 2) == [([[2.0, 2.0]] * 3, "None")] * 2


def take_maximum(ranks: ProcessRanks) -> list[float]:
    tensor = torch.tensor(ONE_TO_FIVE) * (-1 if ranks.rank else 1)
    ranks.max_(tensor)
    return tensor.tolist()


def test_the_maximum_is_taken_elementwise() -> None:
    assert run_ranks(take_maximum, 2) == [ONE_TO_FIVE] * 2


def lose_a_peer(ranks: ProcessRanks, waiting: bool) -> tuple[bool, float, list[int]]:
    """Rank 1 is killed while rank 0 waits for it in a collective, or before rank 0 comes to one."""
    peer = ranks.gather(os.getpid())[1]
    while ranks.rank == 1:
        signal.pause()
    threading.Timer(0.2 if waiting else 0, os.kill, [peer, signal.SIGKILL]).start()
    while not waiting and not ranks.ended_ranks():
        pass
    started = time.monotonic()
    try:
        ranks.sum_([torch.ones(3)])
    except BrokenCollective as error:
        return is_broken_collective(error), time.monotonic() - started, ranks.ended_ranks()
    return False, 0.0, []


@pytest.mark.parametrize("waiting", [True, False])
def test_a_killed_peer_is_noticed_at_once_and_named(waiting: bool) -> None:
    first, second = end_ranks(lose_a_peer, 2, waiting)

    assert (first.error, second.error) == (None, "killed")
    broken, seconds, ended = first.value
    assert (broken, ended) == (True, [1])
    assert seconds < 10


def fail_alone(ranks: ProcessRanks) -> None:
    if ranks.rank == 1:
        raise ValueError("bad row")
    ranks.gather(None)


def test_a_rank_that_fails_leaves_without_waiting_for_the_others() -> None:
    first, second = end_ranks(fail_alone, 2)

    assert "ValueError: bad row" in str(second.error)
    assert "BrokenCollective: the ranks lost each other" in str(first.error)


def test_only_a_collective_that_broke_counts_as_broken() -> None:
    wrapped = RuntimeError("step failed")
    wrapped.__cause__ = BrokenCollective("gone")

    assert is_broken_collective(wrapped)
    assert not is_broken_collective(RuntimeError("Connection reset by peer"))


def refuse(ranks: ProcessRanks) -> str:
    try:
        ranks.gather(lambda: None)
    except Exception as error:
        return type(error).__name__
    return "gathered"


def test_an_object_that_cannot_be_sent_is_no_broken_collective() -> None:
    assert run_ranks(refuse, 2) == ["AttributeError"] * 2


def meet_again(ranks: ProcessRanks) -> list[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = ranks.from_first(probe.getsockname()[1])
    ranks.leave()
    os.environ["MASTER_PORT"] = str(port)
    os.environ.pop(RENDEZVOUS_FD, None)
    return join("cpu").gather(ranks.rank)


def test_ranks_that_another_program_started_bind_the_port_themselves() -> None:
    assert run_ranks(meet_again, 2) == [[0, 1]] * 2
