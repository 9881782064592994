"""Drafts copied from the row itself, against a plain search."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from grpo_engine.config import SamplingConfig
from grpo_engine.rollout.ngram import NgramDrafter

SAMPLING = SamplingConfig()
NO_HIDDEN = torch.empty(0)


def drafter(rows: Sequence[Sequence[int]], min_match: int = 2, max_match: int = 4) -> NgramDrafter:
    made = NgramDrafter(min_match, max_match, 5, torch.device("cpu"))
    made.admit([row[:-1] for row in rows], torch.tensor([row[-1] for row in rows]), NO_HIDDEN)
    return made


def proposals(made: NgramDrafter, count: int) -> list[list[int]]:
    drafts = made.propose(count, SAMPLING, None)
    assert drafts.logprobs_BKV is None
    return [
        tokens[:length] for tokens, length in zip(drafts.tokens_BK.tolist(), drafts.lengths_B.tolist(), strict=True)
    ]


def searched(row: Sequence[int], count: int, min_match: int, max_match: int) -> list[int]:
    """What the longest and latest earlier occurrence was followed by, going round at the end."""
    row = list(row)
    for size in range(max_match, min_match - 1, -1):
        for end in range(len(row) - 1, size - 1, -1):
            if len(row) > size and row[end - size : end] == row[-size:]:
                continuation = row[end:]
                return [continuation[index % len(continuation)] for index in range(count)]
    return []


# ---------------------------------------------------------------- what is drafted
def test_the_continuation_of_the_last_tokens_is_drafted() -> None:
    assert proposals(drafter([[5, 6, 7, 8, 9, 1, 5, 6]]), 3) == [[7, 8, 9]]


def test_the_longest_match_counts_even_when_a_shorter_one_is_later() -> None:
    assert proposals(drafter([[1, 2, 3, 40, 9, 2, 3, 50, 1, 2, 3]]), 1) == [[40]]


def test_among_equal_matches_the_latest_counts() -> None:
    assert proposals(drafter([[2, 3, 40, 2, 3, 50, 2, 3]]), 1) == [[50]]


def test_a_row_in_a_loop_gets_a_full_draft() -> None:
    assert proposals(drafter([[4, 4, 4], [9, 1, 2, 1, 2]]), 5) == [[4] * 5, [1, 2, 1, 2, 1]]


def test_a_row_without_a_match_gets_no_draft() -> None:
    assert proposals(drafter([[1, 2, 3, 4], [2, 3, 9, 2, 3], [7]]), 2) == [[], [9, 2], []]


@pytest.mark.parametrize(("min_match", "max_match"), [(1, 1), (1, 3), (2, 4), (3, 3)])
def test_drafts_are_those_of_a_plain_search(min_match: int, max_match: int) -> None:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 40, (200,), generator=generator).tolist()
    rows = [torch.randint(0, 4, (length + 1,), generator=generator).tolist() for length in lengths]
    expected = [searched(row, 5, min_match, max_match) for row in rows]
    assert proposals(drafter(rows, min_match, max_match), 5) == expected
    assert 0 < sum(map(bool, expected)) < len(rows)


# ---------------------------------------------------------------- rows
def test_rows_follow_the_decoder() -> None:
    """Admitted late, gaining different numbers of tokens, dropped and put in another order: as if made anew."""
    generator = torch.Generator().manual_seed(5)
    rows = [[0, 1, 0], [1, 1], [2, 0, 1, 2]]
    made = drafter(rows)
    for step in range(40):
        gained = torch.randint(0, 3, (len(rows), 4), generator=generator)
        counts = torch.randint(0, 5, (len(rows),), generator=generator)
        made.confirm(gained, counts, NO_HIDDEN)
        rows = [[*row, *new[:count]] for row, new, count in zip(rows, gained.tolist(), counts.tolist(), strict=True)]
        if step == 10:
            long = [index % 3 for index in range(500)]
            made.admit([long], torch.tensor([0]), NO_HIDDEN)
            rows.append([*long, 0])
        if step == 20:
            made.select(torch.tensor([3, 0, 2]))
            rows = [rows[3], rows[0], rows[2]]
    assert proposals(made, 5) == [searched(row, 5, 2, 4) for row in rows]


def test_all_rows_can_go_and_new_ones_come() -> None:
    made = drafter([[1, 2, 1, 2]])
    made.select(torch.empty(0, dtype=torch.long))
    made.admit([[7, 8, 7]], torch.tensor([8]), NO_HIDDEN)
    assert proposals(made, 2) == [[7, 8]]


@pytest.mark.parametrize("missing", [-2, -1, 0, 1, 2, 3, 4, 5])
def test_a_row_that_just_fills_the_buffer_or_just_does_not_goes_on(missing: int) -> None:
    rows = [[1, 2, 1]]
    made = drafter(rows)
    long = [index % 7 for index in range(made._tokens_BT.shape[1] - missing)]
    made.admit([long[:-1]], torch.tensor(long[-1:]), NO_HIDDEN)
    rows.append(long)
    for _ in range(120):
        made.confirm(torch.tensor([[3, 1, 4], [6, 5, 3]]), torch.tensor([3, 3]), NO_HIDDEN)
        rows = [rows[0] + [3, 1, 4], rows[1] + [6, 5, 3]]
    assert proposals(made, 5) == [searched(row, 5, 2, 4) for row in rows]


def test_drafts_that_are_never_kept_take_no_memory() -> None:
    made = drafter([[1, 2, 1, 2]])
    before = made._tokens_BT.shape
    for _ in range(300):
        made.confirm(torch.tensor([[1, 2, 1, 2]]), torch.tensor([0]), NO_HIDDEN)
    assert made._tokens_BT.shape == before
    assert proposals(made, 2) == [[1, 2]]


def test_rows_shorter_than_any_match_are_padded_with_tokens_that_exist() -> None:
    drafts = drafter([[7], [7, 3]], 1, 5).propose(3, SAMPLING, None)
    assert drafts.lengths_B.tolist() == [0, 0]
    assert (drafts.tokens_BK >= 0).all()
