"""Prompt order, held-out parts, procedural addition."""

from __future__ import annotations

import zlib
from itertools import pairwise

import numpy as np
import pytest

from grpo_engine.config import AdditionData
from grpo_engine.data.addition import is_held_out, reasoning
from grpo_engine.data.sources import FiniteSource, WithinContext, check_prompt_lengths, open_source
from grpo_engine.errors import DataError
from grpo_engine.model.tokenizer import character_tokenizer
from grpo_engine.protocols import PromptSource
from grpo_engine.streams import permutation, raw_stream, uniforms
from grpo_engine.types import Prompt

TOKENIZER = character_tokenizer()
RECORDED_RAW = [15203589106923869371, 6140761036583978536]
RECORDED_PERMUTATION = [2, 0, 1, 6, 3, 7, 4, 5]
RECORDED_PROBLEM = ("addition/346+902", "346+902=", "<think></think>1248")


def addition(seed: int = 0, **settings: float) -> PromptSource:
    return open_source(AdditionData.model_validate(settings), TOKENIZER, seed=seed)


def numbered(size: int, seed: int = 0, held: int = 0) -> FiniteSource:
    def build(row: int, position: int) -> Prompt:
        return Prompt(str(row), position, str(row), [row + 1], {})

    return FiniteSource(np.arange(size), np.arange(size, size + held), build, seed)


def ids(prompts: list[Prompt]) -> list[int]:
    return [int(prompt.id) for prompt in prompts]


# ---------------------------------------------------------------- streams
def test_the_streams_never_change() -> None:
    """Recorded once: a change here would change every run's data and samples."""
    assert raw_stream(2, "addition", 0, 4411).tolist() == RECORDED_RAW
    assert permutation(8, "epoch", 0, 1).tolist() == RECORDED_PERMUTATION


def test_streams_differ_by_every_part_of_their_name() -> None:
    names: list[tuple[int | str, ...]] = [(1, 2), (1, 2, 0), (2, 1), (12,), (1, "2"), ("1", 2), (2**32,), (0, 1), (1,)]
    assert len({int(raw_stream(1, *name)[0]) for name in names}) == len(names)


def test_a_longer_draw_starts_with_the_shorter() -> None:
    assert uniforms(100, 7)[:10].tolist() == uniforms(10, 7).tolist()


# ---------------------------------------------------------------- epochs
@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_every_epoch_holds_every_row_once(size: int) -> None:
    order = ids(numbered(size).take(0, 5 * size))
    for epoch in range(5):
        assert sorted(order[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [ids(numbered(50, seed).take(50 * epoch, 50)) for seed in range(3) for epoch in range(3)]
    assert len(set(map(tuple, orders))) == 9


def test_any_window_equals_the_same_part_of_one_long_read() -> None:
    whole = ids(numbered(7).take(0, 40))
    for start in (0, 6, 7, 8, 13, 14, 21, 27):
        assert ids(numbered(7).take(start, 9)) == whole[start : start + 9]


def test_a_position_far_away_costs_no_walk_through_the_epochs() -> None:
    source = numbered(7)
    first = source.take(7 * 10**12 + 3, 1)
    source.take(0, 30)
    assert source.take(7 * 10**12 + 3, 1) == first
    assert first[0].position == 7 * 10**12 + 3


def test_reading_backwards_or_twice_changes_nothing() -> None:
    source = numbered(5)
    assert ids(source.take(12, 4)) == ids(source.take(0, 20))[12:16] == ids(source.take(12, 4))


def test_held_out_rows_keep_their_order_whatever_the_seed() -> None:
    assert ids(numbered(5, seed=1, held=4).held_out(3)) == ids(numbered(5, seed=2, held=4).held_out(3)) == [5, 6, 7]
    assert ids(numbered(5, held=4).held_out(99)) == [5, 6, 7, 8]
    assert numbered(5).held_out(10) == []


# ---------------------------------------------------------------- addition
def test_the_digits_are_added_with_their_carry() -> None:
    assert reasoning(347, 285, 3) == "7+5=12;4+8+1=13;3+2+1=6"
    assert reasoning(999, 1, 3) == "9+1=10;9+0+1=10;9+0+1=10"
    assert reasoning(3, 4, 1) == "3+4=7"


@pytest.mark.parametrize("digits", [1, 2, 3, 5])
def test_every_demonstration_reaches_the_right_sum(digits: int) -> None:
    for prompt in addition(num_digits=digits, think_share=1).take(0, 200):
        left, right = map(int, prompt.text.removesuffix("=").split("+"))
        thoughts, answer = prompt.columns["completion"].removeprefix("<think>").split("</think>")
        last_digits = [line.split("=")[1][-1] for line in thoughts.split(";")]
        carry = thoughts.split("=")[-1][:-1]
        assert (
            int(carry + "".join(reversed(last_digits))) == left + right == int(answer) == int(prompt.columns["answer"])
        )
        assert len(str(left)) == len(str(right)) == digits


def test_the_share_of_thinking_demonstrations_is_as_asked() -> None:
    thinking = [bool(reasoned(prompt)) for prompt in addition(think_share=0.3).take(0, 2000)]
    assert 0.27 < sum(thinking) / 2000 < 0.33
    assert not any(reasoned(prompt) for prompt in addition(think_share=0).take(0, 100))


def reasoned(prompt: Prompt) -> str:
    return str(prompt.columns["completion"]).removeprefix("<think>").split("</think>")[0]


def test_held_out_problems_are_never_trained_on() -> None:
    trained = {prompt.text for prompt in addition().take(0, 2_000)}
    held = {prompt.text for prompt in addition().held_out(256)}
    assert len(held) == 256
    assert not trained & held
    assert all(zlib.crc32(text.encode()) % 10 == 0 for text in held)
    assert not any(is_held_out(text) for text in trained)


def test_all_seeds_evaluate_the_same_problems_and_train_on_others() -> None:
    assert addition(seed=0).held_out(64) == addition(seed=5).held_out(64)
    assert addition().held_out(16) == addition().held_out(64)[:16]
    texts = [[prompt.text for prompt in addition(seed=seed).take(0, 50)] for seed in range(3)]
    assert all(a != b for a, b in pairwise(texts))


def test_a_position_of_addition_is_the_same_problem_for_ever() -> None:
    (prompt,) = addition(seed=0).take(4411, 1)
    assert prompt == addition(seed=0).take(4400, 20)[11]
    assert (prompt.id, prompt.text, prompt.columns["completion"]) == RECORDED_PROBLEM
    assert prompt.token_ids == TOKENIZER(prompt.text).input_ids


def test_a_small_space_gives_the_held_out_problems_it_has() -> None:
    held = addition(num_digits=1).held_out(256)
    everything = [f"{a}+{b}=" for a in range(10) for b in range(10)]
    assert sorted(prompt.text for prompt in held) == sorted(filter(is_held_out, everything))


# ---------------------------------------------------------------- lengths
@pytest.mark.parametrize(("length", "fits"), [(1, True), (7, True), (8, False), (9, False), (0, False)])
def test_a_prompt_must_leave_room_for_one_token(length: int, fits: bool) -> None:
    prompt = Prompt("rows/3", 0, "", [1] * length, {})
    if fits:
        check_prompt_lengths([prompt], max_context_tokens=8)
        return
    with pytest.raises(DataError, match=r"rows/3.*(8 tokens|9 tokens|no tokens)"):
        check_prompt_lengths([prompt], max_context_tokens=8)


class Rows:
    """Prompts as long as their position; the held-out ones have nine tokens."""

    size = None

    def take(self, position: int, count: int) -> list[Prompt]:
        return [Prompt(f"rows/{p}", p, "", [1] * p, {}) for p in range(position, position + count)]

    def held_out(self, count: int) -> list[Prompt]:
        return [Prompt("held/0", 0, "", [1] * 9, {})]


def test_prompts_are_held_against_the_context_as_they_are_taken() -> None:
    source = WithinContext(Rows(), max_context_tokens=8)
    assert [prompt.position for prompt in source.take(1, 7)] == [1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(DataError, match="rows/8 has 8 tokens"):
        source.take(7, 2)
    with pytest.raises(DataError, match="held/0 has 9 tokens"):
        source.held_out(1)


def test_prompts_that_are_too_long_may_be_left_out_instead() -> None:
    source = WithinContext(Rows(), max_context_tokens=8, drop=True)
    assert [prompt.position for prompt in source.take(6, 4)] == [6, 7]
    assert source.held_out(1) == []
    with pytest.raises(DataError, match="rows/0 has no tokens"):
        source.take(0, 1)
