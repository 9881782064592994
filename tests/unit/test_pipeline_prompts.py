from itertools import pairwise

import numpy as np
import pytest

from grpo_engine.data.sources import FiniteSource, WithinContext
from grpo_engine.errors import DataError
from grpo_engine.pipeline.prompts import MAX_DROPPED, take_fitting
from grpo_engine.types import Prompt


class Source:
    """Prompt p has p % 4 + 1 tokens, or always `length`."""

    def __init__(self, size=None, length=None):
        self.size, self.length = size, length

    def take(self, position, count):
        return [
            Prompt(f"p/{p}", p, "", [1] * (self.length or p % 4 + 1), {}) for p in range(position, position + count)
        ]

    def held_out(self, count):
        return self.take(0, count)


def fitting(position, count, **about):
    return take_fitting(WithinContext(Source(**about), max_context_tokens=4, drop=True), position, count)


def test_prompts_without_room_for_a_completion_are_left_out_and_their_places_counted():
    prompts, end = fitting(2, 5)
    assert [prompt.position for prompt in prompts] == [2, 4, 5, 6, 8]  # 3 and 7 have four tokens
    assert end == 9
    assert end - 2 - len(prompts) == 2


def test_the_next_batch_goes_on_where_the_last_ended():
    whole = fitting(0, 12)
    first, middle = fitting(0, 5)
    second, end = fitting(middle, 7)
    assert (first + second, end) == whole


def test_nothing_is_dropped_that_fits():
    source = Source(length=3)
    assert take_fitting(WithinContext(source, 4, drop=True), 7, 3) == (source.take(7, 3), 10)


@pytest.mark.parametrize(("size", "seen"), [(40, 80), (None, MAX_DROPPED)])
def test_a_source_of_which_nothing_fits_is_an_error(size, seen):
    with pytest.raises(DataError, match=rf"none of {seen} prompts from position 9"):
        fitting(9, 8, size=size, length=4)


def test_one_prompt_that_fits_is_found_in_every_epoch_wherever_its_order_puts_it():
    """First in one epoch and last in the next, it is nearly two epochs away."""
    source = FiniteSource(np.arange(6), np.arange(0), lambda row, p: Prompt("", p, "", [1] * (row + 3), {}), seed=0)
    prompts, _ = take_fitting(WithinContext(source, max_context_tokens=4, drop=True), 0, 100)
    places = [prompt.position for prompt in prompts]
    assert [place // 6 for place in places] == list(range(100))
    assert max(later - place for place, later in pairwise(places)) > 6
