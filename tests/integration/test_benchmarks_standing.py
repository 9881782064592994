"""Processes that stay and take turns, with a child that measures nothing."""

from __future__ import annotations

import sys

import pytest

from benchmarks.processes import Side
from benchmarks.standing import Standing, take_turns

CHILD = """
import sys
from contextlib import contextmanager
from benchmarks.standing import serve

@contextmanager
def start(job):
    def measure(order):
        print("a library speaks")
        if order["number"] == job["fails_at"]:
            sys.exit("no more memory")
        return {"tokens": order["number"] * job["rate"], "seconds": 1.0, "order": order}
    yield measure

serve(start)
"""


def side(rate: int, fails_at: int = -1) -> Side:
    return Side(f"rate {rate}", [sys.executable, "-c", CHILD], {"rate": rate, "fails_at": fails_at}, {})


def test_sides_take_turns_after_a_warm_up_that_does_not_count() -> None:
    first, second = take_turns([side(10), side(1)], 2, warm_up={"max_new_tokens": 4})
    assert [answer["tokens"] for answer in first] == [10, 20]
    assert [answer["tokens"] for answer in second] == [1, 2]
    assert first[0]["order"] == {"number": 1}


def test_a_side_that_ends_is_told_with_its_last_words() -> None:
    with Standing(side(10, fails_at=3)) as process, pytest.raises(RuntimeError, match=r"rate 10 .* no more memory"):
        process.ask(number=3)


def test_a_side_ends_when_it_is_closed() -> None:
    process = Standing(side(1))
    process.close()
    assert process._process.returncode == 0
