from hypothesis import given
from hypothesis import strategies as st

from grpo_engine.pipeline.shares import contiguous_share, row_share, split_evenly
from grpo_engine.types import Normalizer, TrainRow, global_denominator

LENGTHS = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 50)), max_size=30)


def rows_of(pairs):
    """Rows whose prompt is a single token repeated; equal prompts meet in runs."""
    return [TrainRow([0] * prompt, list(range(length))) for prompt, length in sorted(pairs)]


@given(st.integers(0, 40), st.integers(1, 9))
def test_contiguous_shares_cover_everything_once_and_differ_by_one(count, world_size):
    shares = split_evenly(count, world_size)
    assert [index for share in shares for index in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert shares == [contiguous_share(count, rank, world_size) for rank in range(world_size)]


@given(LENGTHS, st.integers(1, 5))
def test_every_row_is_trained_on_exactly_one_rank(pairs, world_size):
    rows = rows_of(pairs)
    shares = [row_share(rows, rank, world_size) for rank in range(world_size)]
    assert sorted(map(id, (row for share in shares for row in share))) == sorted(map(id, rows))


def test_a_group_stays_on_one_rank_when_that_balances():
    rows = [TrainRow([prompt], [0] * 10) for prompt in (1, 1, 2, 2)]
    assert [len({row.prompt_ids[0] for row in row_share(rows, rank, 2)}) for rank in (0, 1)] == [1, 1]


def test_a_single_group_is_divided_by_tokens():
    rows = [TrainRow([1], [0] * length) for length in (90, 30, 30, 30)]
    tokens = [sum(len(row.completion_ids) for row in row_share(rows, rank, 2)) for rank in (0, 1)]
    assert tokens == [90, 90]


def test_denominators_by_hand():
    rows = [
        TrainRow([1], [5, 6], loss_mask=[True, False]),
        TrainRow([1], [5, 6, 7]),
        TrainRow([1], [5], loss_mask=[False]),
    ]
    assert global_denominator(rows) == 4
    assert global_denominator(rows, Normalizer("sequences")) == 2
    assert global_denominator(rows, Normalizer("constant", 10)) == 3
    assert global_denominator(rows, Normalizer("constant", 10), num_sampled=8) == 8
    assert [Normalizer("sequences").token_weight(row) for row in rows] == [1, 1 / 3, 1]
    assert Normalizer("constant", 10).token_weight(rows[0]) == 0.1


def test_a_step_without_tokens_divides_by_one():
    assert global_denominator([]) == global_denominator([], Normalizer("constant", 7)) == 1
