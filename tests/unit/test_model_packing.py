from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_engine.model.attention import bucket_sizes, build_buckets
from grpo_engine.model.packing import collate, micro_batches, num_packed_tokens
from grpo_engine.types import TrainRow

CPU = torch.device("cpu")
PROMPTS = st.lists(st.integers(2, 4), min_size=1, max_size=4)
ROWS = st.lists(
    st.builds(TrainRow, PROMPTS, st.lists(st.integers(2, 9), max_size=12)),
    max_size=25,
)


def skewed_rows(count: int, seed: int) -> list[TrainRow]:
    """Log-normal lengths, median 60 and 99th percentile 1,000, prompts included; four rows a prompt."""
    draw, prompt = random.Random(seed), [2, 3]
    rows = []
    for index in range(count):
        prompt = prompt if index % 4 else [draw.randrange(2, 50) for _ in range(6)]
        length = round(math.exp(draw.gauss(math.log(60), math.log(1000 / 60) / 2.326)))
        rows.append(TrainRow(prompt, [3] * min(4000, max(1, length - 6))))
    return rows


@given(ROWS, st.integers(1, 40))
@settings(deadline=None)
def test_every_row_is_in_one_batch_and_the_budget_is_kept(rows: list[TrainRow], budget: int) -> None:
    batches = micro_batches(rows, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(rows)))
    for batch in batches:
        assert batch == sorted(batch)
        assert len(batch) == 1 or num_packed_tokens([rows[index] for index in batch]) <= budget


@given(ROWS, st.integers(1, 40))
@settings(deadline=None)
def test_padded_batches_keep_the_budget_with_their_padding(rows: list[TrainRow], budget: int) -> None:
    batches = micro_batches(rows, budget, packed=False)
    assert sorted(index for batch in batches for index in batch) == list(range(len(rows)))
    for batch in batches:
        width = max(len(rows[index].prompt_ids) + max(0, len(rows[index].completion_ids) - 1) for index in batch)
        assert len(batch) == 1 or len(batch) * width <= budget


@given(ROWS, st.integers(1, 40))
@settings(deadline=None)
def test_batches_depend_on_tokens_alone(rows: list[TrainRow], budget: int) -> None:
    other = [replace(row, advantage=float(index)) for index, row in enumerate(rows)]
    assert micro_batches(other, budget) == micro_batches(rows, budget)


@pytest.mark.parametrize("seed", range(5))
def test_micro_batches_of_skewed_lengths_are_full(seed: int) -> None:
    rows = skewed_rows(1000, seed)
    batches = [[rows[index] for index in batch] for batch in micro_batches(rows, 8192)]
    assert sum(map(num_packed_tokens, batches)) / (8192 * len(batches)) >= 0.91


def test_no_more_batches_than_twice_what_the_tokens_need() -> None:
    rows = skewed_rows(500, 7)
    batches = micro_batches(rows, 4096)
    assert len(batches) < 2 * sum(num_packed_tokens([row]) for row in rows) / 4096 + 1


def test_rows_with_equal_prompts_meet_and_pay_for_the_prompt_once() -> None:
    one, other = [2] * 8, [3] * 8
    rows = [TrainRow(prompt, [4] * 3) for prompt in (one, other, one, other)]
    assert micro_batches(rows, 12) == [[0, 2], [1, 3]]


def test_a_row_above_the_budget_goes_alone() -> None:
    rows = [TrainRow([2], [3] * 4), TrainRow([2], [3] * 50), TrainRow([2], [3] * 4)]
    assert micro_batches(rows, 10) == [[0, 2], [1]]


def test_a_budget_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens 0 must be at least 1"):
        micro_batches([], 0)


def test_the_packed_sequence_holds_shared_prompts_once_and_no_last_tokens() -> None:
    rows = [TrainRow([2, 3], [7, 8, 9]), TrainRow([4], [6]), TrainRow([2, 3], [5, 1])]
    batch = collate(rows, device=CPU, packed=True)
    assert batch.input_ids.tolist() == [[2, 3, 7, 8, 4, 5]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 2]]
    assert batch.feature_index.tolist() == [1, 2, 3, 4, 1, 5]
    assert batch.target_N.tolist() == [7, 8, 9, 6, 5, 1]
    assert batch.row_N.tolist() == [0, 0, 0, 1, 2, 2]
    assert batch.position_in_completion_N.tolist() == [0, 1, 2, 0, 0, 1]
    assert num_packed_tokens(rows) == 6


@given(ROWS, st.integers(0, 30))
@settings(deadline=None)
def test_features_predict_the_same_tokens_packed_and_padded(rows: list[TrainRow], width: int) -> None:
    """The token and position that a completion token is predicted from are those before it in its row."""
    padded = collate(rows, device=CPU, packed=False, pad_to=width)
    packed = collate(rows, device=CPU, packed=True)
    sequences = [row.prompt_ids + row.completion_ids for row in rows]
    before = [(s[p - 1], p - 1) for r, s in zip(rows, sequences, strict=True) for p in range(len(r.prompt_ids), len(s))]
    for batch in (padded, packed):
        ids, positions = batch.input_ids.flatten(), batch.position_ids.flatten()
        found = zip(ids[batch.feature_index].tolist(), positions[batch.feature_index].tolist(), strict=True)
        assert list(found) == before


@given(st.lists(st.integers(1, 1200), min_size=1, max_size=80))
@settings(deadline=None)
def test_buckets_cover_the_rows(lengths: list[int]) -> None:
    lengths = sorted(lengths, reverse=True)
    sizes = bucket_sizes(lengths)
    assert sum(sizes) == len(lengths)
    assert min(sizes) >= 1


@pytest.mark.parametrize("seed", range(3))
def test_padding_inside_attention_wastes_little_in_few_calls(seed: int) -> None:
    for batch in micro_batches(rows := skewed_rows(500, seed), 8192):
        layout = collate([rows[index] for index in batch], device=CPU, packed=True).layout
        tokens = sum(len(rows[index].prompt_ids) + len(rows[index].completion_ids) - 1 for index in batch)
        assert layout is not None
        assert sum(count * width for count, width in layout.shapes) <= 1.10 * tokens + 48
        assert len(layout.shapes) <= 24


def test_equal_lengths_share_one_bucket_and_few_short_rows_are_not_worth_a_call() -> None:
    assert bucket_sizes([50] * 9) == [9]
    assert bucket_sizes([9, 8, 8, 7]) == [4]
    assert bucket_sizes([900, 20, 20]) == [1, 2]


def test_every_token_has_a_slot_and_every_slot_its_row() -> None:
    rows = [TrainRow([2, 3], [7] * 5), TrainRow([2, 3], [8]), TrainRow([9], [4, 4])]
    layout = collate(rows, device=CPU, packed=True).layout
    assert layout is not None
    assert layout.token_S[layout.slot_N].tolist() == list(range(len(layout.slot_N)))
    assert layout.copies is not None
    slots, begins = layout.copies
    owners = [layout.token_S[part].tolist() for part in slots.tensor_split(begins[1:])]
    assert [set(owner) for owner in owners] == [{token} for token in range(len(owners))]
    assert list(map(len, owners))[:2] == [2, 2]


def test_without_shared_prompts_no_slot_is_a_copy() -> None:
    layout = collate([TrainRow([2], [7] * 5), TrainRow([3], [8])], device=CPU, packed=True).layout
    assert layout is not None
    assert layout.copies is None


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("row", "message"),
    [
        (TrainRow([], [3]), "row 1 has an empty prompt"),
        (TrainRow([2], [3], kept_ids=[[4, 5]]), "row 1: sampled token 3 is not among the kept ids"),
        (TrainRow([2], [3, 4], kept_ids=[[3]]), "row 1: kept_ids must be given for each of its 2 tokens"),
        (TrainRow([2], [3, 4]), "row 1: kept_ids must be given for each of its 2 tokens"),
    ],
)
def test_broken_rows_are_named(row: TrainRow, message: str, packed: bool) -> None:
    first = TrainRow([2], [5], kept_ids=[[5, 6]])
    with pytest.raises(ValueError, match=message):
        collate([first, row], device=CPU, packed=packed)


def test_kept_ids_come_padded_chunk_by_chunk() -> None:
    rows = [TrainRow([2], [5, 6], kept_ids=[[5, 7], [6]]), TrainRow([2], [4], kept_ids=[[1, 3, 4]])]
    kept = collate(rows, device=CPU, packed=True).kept_ids
    assert kept is not None
    ids, real = kept.padded(1, 3)
    assert ids.tolist() == [[6, 0, 0], [1, 3, 4]]
    assert real.tolist() == [[True, False, False], [True, True, True]]


def test_no_rows_and_no_completions_make_an_empty_batch() -> None:
    for rows in ([], [TrainRow([3, 4], [])]):
        for packed in (True, False):
            assert collate(rows, device=CPU, packed=packed).target_N.shape == (0,)
    assert micro_batches([], 10) == []


def test_bucket_positions_count_from_the_row_begin() -> None:
    at = np.array
    buckets = build_buckets(at([0, 0]), at([2, 2]), at([2, 5]), at([5, 3]), 6)
    assert buckets.position_N.tolist() == [0, 1, 2, 3, 4, 2]
    assert buckets.shapes == ((2, 5),)
