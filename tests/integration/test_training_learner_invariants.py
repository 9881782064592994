"""The gradient of a step depends on its rows alone: not on micro-batches, calls, order, padding or ranks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_engine.config_training import (
    AuxiliaryConfig,
    CISPOLoss,
    ClipLoss,
    CorrectionConfig,
    EntropyConfig,
    GSPOLoss,
    KLConfig,
    NormalizerKind,
)
from grpo_engine.training.learner import TorchLearner
from grpo_engine.training.objectives import Objective, PolicyObjective, SupervisedObjective
from grpo_engine.types import Normalizer, StepResult, TrainRow, global_denominator
from tests.unit.training_fixtures import (
    ALL_TOKENS,
    ThreadRanks,
    assert_close,
    learner,
    masked_out,
    on_ranks,
    ragged_rows,
    tiny_llama,
)

NORMALIZERS: tuple[NormalizerKind, ...] = ("tokens", "sequences", "constant")
LOSSES = {
    "clip": ClipLoss(clip_high=0.28, dual_clip=3.0),
    "gspo": GSPOLoss(clip_low=0.3, clip_high=0.4),
    "cispo": CISPOLoss(),
}


def policy_objective(loss: str, normalizer: NormalizerKind) -> PolicyObjective:
    """Every term of the objective at once."""
    return PolicyObjective(
        temperature=0.7,
        loss=LOSSES[loss],
        kl=KLConfig(weight=0.1, unbiased=True),
        entropy=EntropyConfig(bonus=0.05),
        correction=CorrectionConfig(kind="mask", level="sequence", min_weight=0.2),
        auxiliary=AuxiliaryConfig(weight=0.1),
        normalizer=Normalizer(normalizer, 9),
    )


OBJECTIVES: dict[str, Objective] = {
    f"{loss}-{kind}": policy_objective(loss, kind) for loss, kind in itertools.product(LOSSES, NORMALIZERS)
} | {"supervised": SupervisedObjective()}
ROWS = ragged_rows(8)


def step(
    calls: Sequence[Sequence[TrainRow]], objective: Objective, *, packed: bool = True, limit: int = ALL_TOKENS,
    dtype: torch.dtype = torch.float64, **options: Any,
) -> tuple[dict[str, Tensor], StepResult]:  # fmt: skip
    """Gradients (of the critic too) and result of one step, of one accumulate call for each part of it."""
    trainer = learner(tiny_llama(dtype=dtype), objective, memory={"max_micro_batch_tokens": limit}, **options)
    trainer._passes._forward.packed = packed
    denominator = global_denominator([row for rows in calls for row in rows], objective.normalizer)
    for rows in calls:
        trainer.accumulate(rows, denominator)
    found = {name: gradient.clone() for name, gradient in trainer.gradients().items()}
    return found, trainer.step()


def assert_same(one: tuple[dict[str, Tensor], StepResult], other: tuple[dict[str, Tensor], StepResult]) -> None:
    assert_close(one[0], other[0], 1e-9)
    stats, expected = ({n: v for n, v in each[1].stats.items() if "memory/" not in n} for each in (other, one))
    assert stats == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert one[1].gradient_norm > 0.01


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("limit", [1, 14, 40])
def test_the_token_limit_changes_neither_gradient_nor_statistics(name: str, limit: int) -> None:
    assert_same(step([ROWS], OBJECTIVES[name]), step([ROWS], OBJECTIVES[name], limit=limit))


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("calls", [2, 4])
def test_calls_of_accumulate_change_nothing(name: str, calls: int) -> None:
    parts = [ROWS[index::calls] for index in range(calls)]
    assert_same(step([ROWS], OBJECTIVES[name]), step(parts, OBJECTIVES[name]))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_row_order_and_padding_change_nothing(name: str) -> None:
    whole = step([ROWS], OBJECTIVES[name], limit=40)
    assert_same(whole, step([random.Random(3).sample(ROWS, len(ROWS))], OBJECTIVES[name], limit=40))
    assert_same(whole, step([ROWS], OBJECTIVES[name], packed=False))
    assert_same(whole, step([ROWS], OBJECTIVES[name], packed=False, limit=25, pad_token_id=7))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_fully_masked_rows_add_nothing_but_leave_the_rest_alone(name: str) -> None:
    objective, empty = OBJECTIVES[name], masked_out(ragged_rows(len(ROWS), seed=5))
    whole, found = step([ROWS], objective), step([[*ROWS, *empty]], objective)
    if objective.normalizer.kind == "constant":  # masked sequences count: twice as many
        found = ({name: gradient * 2 for name, gradient in found[0].items()}, whole[1])
    assert_same(whole, found)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_fully_masked_step_is_zero_and_not_nan(name: str) -> None:
    found, result = step([masked_out(ROWS)], OBJECTIVES[name])
    assert (found, result.applied, result.gradient_norm, result.stats) == ({}, True, 0.0, {})


@pytest.mark.parametrize("name", OBJECTIVES)
def test_float32_gradients_agree_to_a_millionth(name: str) -> None:
    options: dict[str, Any] = {"dtype": torch.float32}
    whole, _ = step([ROWS], OBJECTIVES[name], **options)
    for rows in ([ROWS[:3], ROWS[3:]], [ROWS[::-1]]):
        assert_close(whole, step(rows, OBJECTIVES[name], limit=14, **options)[0], 1e-6)


@pytest.mark.parametrize("backbone", ["copied", "shared"])
def test_the_critics_gradient_is_as_invariant(backbone: str) -> None:
    objective, options = OBJECTIVES["clip-sequences"], {"value": {"backbone": backbone}}
    whole = step([ROWS], objective, **options)
    assert any(name.startswith("value.") for name in whole[0])
    for rows, limit in (([ROWS], 14), ([ROWS[:3], ROWS[3:]], ALL_TOKENS), ([ROWS[::-1]], 40)):
        assert_same(whole, step(rows, objective, limit=limit, **options))
    assert_same(whole, step([ROWS], objective, packed=False, **options))


# ---------------------------------------------------------------- ranks
def spy_on_the_sum(trainer: TorchLearner) -> dict[str, Tensor]:
    """Filled with the summed gradients when the optimizer is called."""
    seen: dict[str, Tensor] = {}

    def look(*_: object) -> None:
        seen.update({name: gradient.clone() for name, gradient in trainer.gradients().items()})

    trainer._optimizer.register_step_pre_hook(look)
    return seen


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("count", [2, 3])
def test_the_number_of_ranks_changes_nothing(name: str, count: int) -> None:
    objective = OBJECTIVES[name]
    unclipped = {"max_gradient_norm": 1e6}

    def work(ranks: ThreadRanks) -> tuple[dict[str, Tensor], StepResult]:
        trainer = learner(tiny_llama(), objective, communicator=ranks, optimizer=unclipped)
        seen = spy_on_the_sum(trainer)
        trainer.accumulate(ROWS[ranks.rank :: count], global_denominator(ROWS, objective.normalizer))
        return seen, trainer.step()

    alone = step([ROWS], objective)
    for found in on_ranks(count, work):
        assert_same(alone, found)


def test_more_ranks_than_rows_and_a_critic_change_nothing() -> None:
    objective, rows = OBJECTIVES["clip-tokens"], ROWS[:2]

    def work(ranks: ThreadRanks) -> tuple[dict[str, Tensor], StepResult]:
        trainer = learner(tiny_llama(), objective, communicator=ranks, value={}, optimizer={"max_gradient_norm": 1e6})
        seen = spy_on_the_sum(trainer)
        trainer.accumulate(rows[ranks.rank :: 3], global_denominator(rows))
        return seen, trainer.step()

    alone = step([rows], objective, value={})
    for found in on_ranks(3, work):
        assert_same(alone, found)


def test_small_buckets_sum_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_engine.training.optimizer.BUCKET_BYTES", 3000)
    test_the_number_of_ranks_changes_nothing("clip-tokens", 2)
