from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from grpo_engine.config_training import EntropyConfig
from grpo_engine.training.entropy_mask import threshold
from grpo_engine.types import TrainRow
from tests.unit.training_fixtures import (
    POLICY,
    ThreadRanks,
    learner,
    masked_out,
    on_ranks,
    ragged_rows,
    tiny_llama,
    update,
)

TOP = replace(POLICY, entropy=EntropyConfig(top_share=0.3))
ROWS = [row for row in ragged_rows(9, old_logprobs=None) if row.num_trained_tokens]


def test_rows_stay_as_they_are_where_nothing_is_needed() -> None:
    assert learner(tiny_llama()).prepare(ROWS) == ROWS


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("limit", [1, 24, 1000])
def test_frozen_log_probabilities_give_ratio_one_at_the_first_update_alone(dtype: str, limit: int) -> None:
    memory = {"max_micro_batch_tokens": limit}
    trainer = learner(tiny_llama(dtype=torch.float32), freeze_old=True, dtype=dtype, memory=memory)
    rows = trainer.prepare([*ROWS, *masked_out(ragged_rows(3, seed=4, old_logprobs=None))])
    first, second = (update(trainer, rows).stats for _ in range(2))
    assert (first["policy/ratio_mean"], first["policy/ratio_max"]) == (1.0, 1.0)
    assert second["policy/ratio_max"] > 1.001


def test_given_old_log_probabilities_and_untrained_rows_are_left_alone() -> None:
    given = ragged_rows(2, seed=1)
    empty = masked_out(ragged_rows(1, seed=2, old_logprobs=None))
    prepared = learner(tiny_llama(), freeze_old=True).prepare([*given, *empty, ROWS[0]])
    assert prepared[:3] == [*given, *empty]
    assert prepared[3] == replace(ROWS[0], old_logprobs=prepared[3].old_logprobs)
    assert len(prepared[3].old_logprobs or []) == len(ROWS[0].completion_ids)


def trained_flags(rows: list[TrainRow]) -> list[bool]:
    """policy_mask of every trained token."""
    flags = [(row.policy_mask or [], row.loss_mask or [True] * len(row.completion_ids)) for row in rows]
    return [kept for mask, trained in flags for kept, counts in zip(mask, trained, strict=True) if counts]


def test_the_mask_keeps_the_share_of_highest_entropy_and_nothing_else_changes() -> None:
    trainer = learner(tiny_llama(), TOP)
    prepared = trainer.prepare(ROWS)
    flags = trained_flags(prepared)
    assert sum(flags) == math.ceil(0.3 * len(flags))
    assert [replace(row, policy_mask=None) for row in prepared] == ROWS
    entropies = torch.cat(trainer._passes.measure(ROWS)[1])
    kept = torch.tensor([flag for row in prepared for flag in row.policy_mask or []])
    assert entropies[kept].min() > entropies[~kept].max()


@pytest.mark.parametrize("count", [2, 3])
def test_the_threshold_is_that_of_all_ranks(count: int) -> None:
    def work(ranks: ThreadRanks) -> list[TrainRow]:
        return learner(tiny_llama(), TOP, communicator=ranks).prepare(ROWS[ranks.rank :: count])

    parts = on_ranks(count, work)
    alone = learner(tiny_llama(), TOP).prepare(ROWS)
    assert [row.policy_mask for part in parts for row in part] == [
        row.policy_mask for rank in range(count) for row in alone[rank::count]
    ]


def test_a_rank_without_rows_takes_part_in_the_threshold() -> None:
    def work(ranks: ThreadRanks) -> list[TrainRow]:
        return learner(tiny_llama(), TOP, communicator=ranks).prepare(ROWS if ranks.rank else [])

    assert on_ranks(2, work) == [[], learner(tiny_llama(), TOP).prepare(ROWS)]


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([1.0, 2.0, 3.0, 4.0, 5.0], 0.4, 4.0),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 0.41, 3.0),
        ([5.0, 5.0, 5.0, 1.0], 0.25, 5.0),
        ([3.0], 0.01, 3.0),
        ([float(x) for x in range(30)], 0.1, 27.0),
    ],
)
def test_thresholds_by_hand(values: list[float], share: float, expected: float) -> None:
    parts = [torch.tensor(values[:1]), torch.tensor(values[1:])]
    assert threshold(parts, share) == expected


def test_the_threshold_of_nothing_keeps_everything() -> None:
    assert threshold([torch.zeros(0)], 0.5) == -math.inf
