import pytest

from grpo_engine.data.sources import WithinContext
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


@pytest.mark.parametrize("size", [40, None])
def test_a_source_of_which_nothing_fits_is_an_error(size):
    with pytest.raises(DataError, match=rf"none of {size or MAX_DROPPED} prompts from position 9"):
        fitting(9, 8, size=size, length=4)
