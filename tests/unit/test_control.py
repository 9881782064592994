"""A rank's gate: before the deadline it passes, past it it waits, and a lost run or a gone supervisor raises."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator

import pytest

from grpo_engine.communicator import ProcessRanks, SingleRank
from grpo_engine.control import Control, SharedControl
from grpo_engine.errors import LeaseLost
from grpo_engine.events import boot_clock_s
from tests.distributed import run_ranks


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    for descriptor in (reading, writing):
        try:
            os.close(descriptor)
        except OSError:
            continue


def write(pipe: tuple[int, int], *messages: dict[str, object]) -> None:
    os.write(pipe[1], b"".join(json.dumps(message).encode() + b"\n" for message in messages))


def test_a_rank_started_by_hand_may_do_everything() -> None:
    control = Control()

    control.wait_until_allowed()
    assert control.messages() == []


def test_before_the_deadline_the_gate_is_open(pipe: tuple[int, int]) -> None:
    control = Control(pipe[0], boot_clock_s() - 1)
    write(pipe, {"deadline_boot_s": boot_clock_s() + 60})

    control.wait_until_allowed()


def test_past_the_deadline_the_gate_opens_when_it_is_renewed(pipe: tuple[int, int]) -> None:
    control = Control(pipe[0], boot_clock_s() - 1)
    renewed_at: list[float] = []

    def renew() -> None:
        renewed_at.append(boot_clock_s())
        write(pipe, {"deadline_boot_s": boot_clock_s() + 60})

    timer = threading.Timer(0.1, renew)
    timer.start()
    control.wait_until_allowed()
    timer.join()

    assert renewed_at
    assert boot_clock_s() >= renewed_at[0]


def test_an_old_deadline_keeps_the_gate_shut_until_the_pipe_closes(pipe: tuple[int, int]) -> None:
    control = Control(pipe[0], 0.0)
    write(pipe, {"deadline_boot_s": boot_clock_s() - 5})
    timer = threading.Timer(0.1, os.close, [pipe[1]])
    timer.start()

    with pytest.raises(LeaseLost):
        control.wait_until_allowed()
    timer.join()


def test_a_lost_run_raises_even_before_the_deadline(pipe: tuple[int, int]) -> None:
    control = Control(pipe[0])
    write(pipe, {"deadline_boot_s": boot_clock_s() + 60}, {"lost": True})

    with pytest.raises(LeaseLost):
        control.wait_until_allowed()


def test_operator_messages_are_kept_in_order_and_torn_lines_wait(pipe: tuple[int, int]) -> None:
    control = Control(pipe[0])
    write(pipe, {"early_stopping": "stop"})
    os.write(pipe[1], b'{"early_sto')
    assert control.messages() == [{"early_stopping": "stop"}]

    os.write(pipe[1], b'pping": "off"}\n')
    assert control.messages() == [{"early_stopping": "stop"}, {"early_stopping": "off"}]


def obey(ranks: ProcessRanks, told_rank: int) -> list[object]:
    """Only `told_rank` is signalled and told something; what this rank sees before and after they synchronise."""
    reading, writing = os.pipe()
    own = Control(reading)
    shared = SharedControl(own, ranks)
    shared.synchronise()
    if ranks.rank == told_rank:
        write((reading, writing), {"early_stopping": "stop"})
        own.stop_requested = True
    before = shared.stop_requested, shared.messages()
    shared.synchronise()
    return [before, (shared.stop_requested, shared.messages())]


def test_all_ranks_see_what_rank_0_was_told_from_the_same_turn_on() -> None:
    assert run_ranks(obey, 2, 0) == [[(False, []), (True, [{"early_stopping": "stop"}])]] * 2


def test_what_another_rank_alone_was_told_moves_nobody() -> None:
    assert run_ranks(obey, 2, 1) == [[(False, []), (False, [])]] * 2


def test_each_rank_waits_at_its_own_gate(pipe: tuple[int, int]) -> None:
    shared = SharedControl(Control(pipe[0]), SingleRank())
    write(pipe, {"lost": True})

    with pytest.raises(LeaseLost):
        shared.wait_until_allowed()
