"""The ranks of one engine: Python objects and tensors between them. `join` once, `leave` once.

Objects and CPU tensors go over gloo, CUDA tensors over NCCL; one process group holds both, so every collective finds
its way by the tensor's device.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_engine.errors import BrokenCollective
from grpo_engine.failures import is_broken_collective
from grpo_engine.launch import RENDEZVOUS_FD, process_table

__all__ = ["ProcessRanks", "SingleRank", "is_broken_collective", "join"]

T = TypeVar("T")
TIMEOUT = timedelta(hours=24)
"""A rank may rightly be held for long: at the supervisor's deadline, by a slow reward. A peer that died is noticed by
its closed socket, not by this."""
log = logging.getLogger("cohort")


class SingleRank:
    """The only rank: every collective is the identity. Needs no torch.distributed."""

    rank = 0
    world_size = 1

    def gather(self, value: T) -> list[T]:
        return [value]

    def from_first(self, value: T) -> T:
        return value

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        return

    def max_(self, tensor: Tensor) -> None:
        return

    def ended_ranks(self) -> list[int]:
        return []

    def leave(self, *, failed: bool = False) -> None:
        return


class ProcessRanks:
    """A rank among several, one process each, on one host. `protocols.Communicator` says what the methods mean.

    A collective raises BrokenCollective when a peer has ended; after that only `ended_ranks` and `leave` make sense.
    """

    def __init__(self, rank: int, world_size: int, *, on_cuda: bool) -> None:
        """The default process group must exist."""
        self.rank = rank
        self.world_size = world_size
        self._on_cuda = on_cuda
        self._pids = self.gather(os.getpid())

    def gather(self, value: T) -> list[T]:
        values: list[T | None] = [None] * self.world_size
        with _collective():
            dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]  # every place is filled

    def from_first(self, value: T) -> T:
        box = [value if self.rank == 0 else None]
        with _collective():
            dist.broadcast_object_list(box, src=0)
        return box[0]  # type: ignore[return-value]

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Floating sums have the same bits on every rank, since each element is added up in one place."""
        self._reduce(tensors, dist.ReduceOp.SUM)

    def max_(self, tensor: Tensor) -> None:
        """NaN may or may not win: reduce a flag where that matters."""
        self._reduce([tensor], dist.ReduceOp.MAX)

    def ended_ranks(self) -> list[int]:
        """Ranks whose process has ended. Not collective."""
        states = {pid: state for pid, (_, state) in process_table().items()}
        return [rank for rank, pid in enumerate(self._pids) if states.get(pid, "X") in "ZX"]

    def leave(self, *, failed: bool = False) -> None:
        """Part from the others, waiting for them first unless this rank failed. Raises nothing."""
        if not failed:
            try:
                self.gather(None)
            except BrokenCollective as error:
                log.warning("a rank ended before it took its leave: %s", error)
                failed = True
        if failed and self._on_cuda:
            return  # NCCL would wait for the peer that has gone; the end of the process frees everything
        dist.destroy_process_group()

    @torch.no_grad()
    def _reduce(self, tensors: Sequence[Tensor], operation: dist.ReduceOp.RedOpType) -> None:
        with _collective():
            if any(tensor.is_cuda for tensor in tensors):
                # NCCL spins on the device for a peer that is late and never notices one that died; gloo does both.
                dist.all_gather_object([None] * self.world_size, None)
            # Gloo silently reduces the wrong elements of a tensor that is not contiguous.
            dense = [tensor.contiguous() for tensor in tensors]
            works = [dist.all_reduce(tensor, operation, async_op=True) for tensor in dense]
            for work in works:
                if work is not None:
                    work.wait()
        for tensor, reduced in zip(tensors, dense, strict=True):
            if reduced is not tensor:
                tensor.copy_(reduced)


def join(device_type: str) -> SingleRank | ProcessRanks:
    """Meet the other ranks as RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say; one rank meets nobody.

    `device_type`: cpu or cuda; on cuda this also chooses the device LOCAL_RANK. Raises BrokenCollective when the
    others cannot be met.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        return SingleRank()
    rank = int(os.environ["RANK"])
    on_cuda = device_type == "cuda" and torch.cuda.is_available()  # where it is not, the engine refuses the config
    if on_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
    with _collective():
        dist.init_process_group(backend, store=_store(rank), rank=rank, world_size=world_size, timeout=TIMEOUT)
    return ProcessRanks(rank, world_size, on_cuda=on_cuda)


def _store(rank: int) -> Any:
    """Where ranks exchange addresses. The parent listens on the port before any rank exists and hands that socket to
    rank 0, so no other program can take the port in between; ranks started by other means bind it here."""
    listening = os.environ.get(RENDEZVOUS_FD) if rank == 0 else None
    return dist.TCPStore(  # type: ignore[attr-defined]  # documented, though not in __all__
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=rank == 0, timeout=TIMEOUT,
        wait_for_workers=False, master_listen_fd=int(listening) if listening else None,
    )  # fmt: skip


@contextmanager
def _collective() -> Iterator[None]:
    """torch tells a peer's end as a plain RuntimeError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise BrokenCollective(f"the ranks lost each other: {error}") from error
