"""Run a function in several real processes that have joined each other over gloo."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from socket import socket
from typing import Any

from grpo_engine.launch import LOOPBACK, RENDEZVOUS_FD, listen

_START = multiprocessing.get_context("forkserver")  # torch is loaded once, in the server that the ranks are forked from
_START.set_forkserver_preload(["torch", "torch.distributed", "grpo_engine.communicator"])


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How one rank ended."""

    value: Any = None
    """What the function returned."""
    error: str | None = None
    """The traceback of what it raised; `killed` when the process ended without a word."""


def run_ranks(function: Callable[..., Any], num_ranks: int, *arguments: Any, seconds: float = 60) -> list[Any]:
    """`function(communicator, *arguments)` in `num_ranks` processes; what each returned, in rank order.

    The function must be at the top level of its module; arguments and results are pickled. Each rank has one thread.
    AssertionError holds the tracebacks of ranks that failed.
    """
    ends = end_ranks(function, num_ranks, *arguments, seconds=seconds)
    errors = [f"rank {rank}: {end.error}" for rank, end in enumerate(ends) if end.error]
    assert not errors, "\n".join(errors)
    return [end.value for end in ends]


def end_ranks(function: Callable[..., Any], num_ranks: int, *arguments: Any, seconds: float = 60) -> list[RankEnd]:
    """As `run_ranks`, for functions that are meant to fail. No process is left when this returns."""
    started = []
    with listen() as meeting:
        for rank in range(num_ranks):
            receiving, sending = _START.Pipe(duplex=False)
            fields = (rank, num_ranks, meeting.getsockname()[1], meeting if rank == 0 else None)
            process = _START.Process(target=_run_rank, args=(sending, function, arguments, *fields), daemon=True)
            process.start()
            sending.close()
            started.append((process, receiving))
    try:
        return [_receive(receiving, seconds) for _, receiving in started]
    finally:
        for process, receiving in started:
            receiving.close()
            process.kill()
            process.join()
            process.close()


def _receive(receiving: Connection, seconds: float) -> RankEnd:
    assert receiving.poll(seconds), f"a rank did not end within {seconds:g} s"
    try:
        end: RankEnd = receiving.recv()
    except EOFError:
        return RankEnd(error="killed")
    return end


def _run_rank(
    sending: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    rank: int,
    num_ranks: int,
    port: int,
    meeting: socket | None,
) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= LOOPBACK | {name: str(value) for name, value in place.items()}
    if meeting is not None:
        os.environ[RENDEZVOUS_FD] = str(meeting.detach())
    import torch

    from grpo_engine.communicator import join

    torch.set_num_threads(1)
    communicator = join("cpu")
    try:
        end = RankEnd(function(communicator, *arguments))
    except Exception:
        end = RankEnd(error=traceback.format_exc())
    communicator.leave(failed=end.error is not None)
    sending.send(end)
