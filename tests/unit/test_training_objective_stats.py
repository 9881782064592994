"""What the objectives report beside the loss, what they refuse, and the losses of demonstrations and critic."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import tensor

from grpo_engine.config import RLStage
from grpo_engine.config_training import (
    AuxiliaryConfig,
    ClipLoss,
    CorrectionConfig,
    EntropyConfig,
    KLConfig,
    ValueConfig,
)
from grpo_engine.model.logprobs import TokenLogprobs
from grpo_engine.training import objectives as module
from grpo_engine.training.objectives import PolicyObjective, SupervisedObjective, value_sums
from grpo_engine.types import Normalizer, TrainRow
from tests.unit.oracles.mutation import mutant
from tests.unit.oracles.objective import Batch, random_batch

FULL = PolicyObjective(
    temperature=1.0,
    kl=KLConfig(weight=0.1),
    entropy=EntropyConfig(bonus=0.05),
    correction=CorrectionConfig(kind="truncate", max_weight=1.3),
    auxiliary=AuxiliaryConfig(weight=0.2),
    normalizer=Normalizer("sequences"),
)


def test_parts_add_up_to_the_loss() -> None:
    batch = random_batch([4, 6], 12)
    sums = FULL(batch.logprobs(), batch.rows)
    assert set(sums.parts) == {"loss/policy", "loss/kl", "loss/entropy", "loss/auxiliary"}
    assert sum(float(part) for part in sums.parts.values()) == pytest.approx(sums.loss.item(), rel=1e-12)


def test_statistics_by_hand() -> None:
    # ratios 1.5 (three tokens, good), 0.5 (one token, bad), 1 (two trained tokens), 9 (masked)
    rows = [
        TrainRow([9], [2, 3, 4], 1.0, [-1.5] * 3, [-1 - math.log(1.5)] * 3, [-1.0] * 3),
        TrainRow([9], [5], -1.0, [-1.0], [-1 - math.log(0.5)], [-1 - math.log(2)]),
        TrainRow(
            [9], [6, 7, 8], 1.0, [-1.0] * 3, [-1, -1, -1 - math.log(9)], [-1.0] * 3, loss_mask=[True, True, False]
        ),
    ]
    flat = Batch(rows, [-1.0] * 7, [-1.0] * 7, [2.0] * 7)
    stats = PolicyObjective(temperature=1.0, loss=ClipLoss(clip_high=0.28))(flat.logprobs(), rows).stats
    gap = 0.5 - math.log(1.5)  # -1 - ln 1.5 against -1.5
    expected = {"policy/clip_high_share": 3, "policy/clip_low_share": 1, "policy/clip_share": 4, "policy/entropy": 12}
    expected |= {"policy/ratio_mean": 3 * 1.5 + 0.5 + 2, "policy/kl": -0.5 + math.log(2)}
    expected["sampler/logprob_gap_k3"] = 3 * (math.exp(gap) - gap - 1) + (1 - math.log(2))
    assert {name: value.item() for name, value in stats.items()} == pytest.approx(expected)


def test_kl_is_measured_without_a_weight_and_absent_when_not_tracked() -> None:
    batch = random_batch([4, 3], 2)
    tracked = replace(FULL, kl=KLConfig())(batch.logprobs(), batch.rows)
    rows = [replace(row, ref_logprobs=None) for row in batch.rows]
    untracked = replace(FULL, kl=KLConfig(track=False))(batch.logprobs(), rows)
    assert tracked.stats.pop("policy/kl").item() > 0
    assert tracked.loss.item() == untracked.loss.item()
    assert tracked.stats.keys() == untracked.stats.keys()


def test_the_gap_to_the_sampler_is_measured_though_old_is_the_samplers() -> None:
    batch = random_batch([4, 3], 2, with_old=False)
    sums = replace(FULL, old_logprobs="sampler", correction=CorrectionConfig())(batch.logprobs(), batch.rows)
    assert sums.stats["sampler/logprob_gap_k3"].item() > 0
    assert sums.maxima["policy/ratio_max"].item() > 1


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("ref_logprobs", None, "row 0 has no ref_logprobs, which the objective needs"),
        ("rollout_logprobs", None, "row 0 has no rollout_logprobs, which the objective needs"),
        ("old_logprobs", [-1.0] * 30, "row 0: 30 values of old_logprobs for 4 tokens"),
        ("loss_mask", [True] * 30, "row 0: 30 values of loss_mask for 4 tokens"),
        ("completion_ids", [2] * 3, "7 values for 6 completion tokens in 2 rows"),
    ],
)
def test_rows_that_lack_something_are_refused(field: str, value: object, message: str) -> None:
    batch = random_batch([4, 3], 2)
    rows = [replace(row, **{field: value}) if field != "completion_ids" else row for row in batch.rows]
    if field == "completion_ids":
        rows[0] = replace(rows[0], completion_ids=[2] * 3)
    with pytest.raises(ValueError, match=message):
        FULL(batch.logprobs(), rows)


def test_an_objective_is_made_from_a_stage() -> None:
    stage = RLStage.model_validate(
        {
            "data": {"source": "addition"},
            "rewards": [{"kind": "accuracy"}],
            "sampling": {"temperature": 0.7, "max_new_tokens": 40},
            "loss": {"kind": "cispo", "normalizer": "constant"},
            "entropy": {"bonus": 0.01, "top_share": 0.2},
            "old_logprobs": "sampler",
        }
    )
    objective = PolicyObjective.from_stage(stage)
    assert (objective.temperature, objective.normalizer) == (0.7, Normalizer("constant", 40))
    assert (objective.entropy_gradient, objective.top_entropy_share) == (True, 0.2)
    assert (objective.loss, objective.kl, objective.correction) == (stage.loss, stage.kl, stage.correction)
    assert (objective.auxiliary, objective.old_logprobs) == (stage.auxiliary, "sampler")


# ---------------------------------------------------------------- supervised and critic
def test_supervised_loss_is_the_sum_of_trained_tokens() -> None:
    rows = [TrainRow([1], [2, 3], loss_mask=[True, False]), TrainRow([1], [4])]
    full = tensor([-0.5, math.nan, -2.0], dtype=torch.float64, requires_grad=True)
    sums = SupervisedObjective()(TokenLogprobs(full, full, full, tensor([True, True, False])), rows)
    sums.loss.backward()
    assert sums.loss.item() == 2.5
    assert full.grad is not None
    assert full.grad.tolist() == [-1.0, 0.0, -1.0]
    assert {name: value.item() for name, value in sums.stats.items()} == {"sft/token_accuracy": 1.0}


def value_rows() -> list[TrainRow]:
    return [
        TrainRow([1], [2, 3], returns=[1.0, 0.0], old_values=[0.5, 0.5]),
        TrainRow([1], [2, 3], returns=[2.0, math.nan], old_values=[0.5, math.nan], loss_mask=[True, False]),
    ]


VALUES = tensor([1.0, 0.5, 0.6, math.nan], dtype=torch.float64)


def test_value_sums_by_hand() -> None:
    values = VALUES.clone().requires_grad_()
    sums = value_sums(values, value_rows(), ValueConfig(clip=0.2, loss_weight=0.5), Normalizer("sequences"))
    sums.loss.backward()
    # token losses 0.045 (clipped to 0.7), 0.125, 0.98; token weights 1/2, 1/2, 1
    assert sums.loss.item() == pytest.approx(0.5 * (0.0225 + 0.0625 + 0.98))
    assert sums.parts["loss/value"].item() == sums.loss.item()
    assert sums.stats["value/loss"].item() == pytest.approx(1.15)
    assert (sums.stats["value/clip_share"].item(), sums.stats["value/mean"].item()) == (1.0, pytest.approx(2.1))
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, 0.125, -0.7, 0.0])


def variance_share(implementation: Any, rows: list[TrainRow]) -> float | None:
    """Explained variance of VALUES; three tokens are trained."""
    stats = implementation.value_sums(VALUES, rows, ValueConfig(clip=None)).stats
    found: float | None = implementation.explained_variance({name: value.item() / 3 for name, value in stats.items()})
    return found


def test_explained_variance_by_hand() -> None:
    errors = [0.0, -0.5, 1.4]  # of mean 0.3; the returns 1 0 2 have variance 2/3
    expected = 1 - (sum((error - 0.3) ** 2 for error in errors) / 3) / (2 / 3)
    assert variance_share(module, value_rows()) == pytest.approx(expected)
    assert variance_share(module, [replace(row, returns=[0.3, 0.3]) for row in value_rows()]) is None


VALUE_MUTATIONS = [
    ("value_sums", "value.loss_weight * loss", "loss"),
    ("value_sums", "* _token_weights(columns, rows, normalizer)", ""),
    ("value_sums", 'masked(columns.numbers("old_values"), mask)', "values.detach()"),
    ("value_sums", "(returns - values).detach()", "(returns + values).detach()"),
    ("explained_variance", '- means["value/return_mean"] ** 2', ""),
    ("explained_variance", '- means["value/error_mean"] ** 2', ""),
]


@pytest.mark.parametrize(("function", "original", "mutated"), VALUE_MUTATIONS)
def test_a_mutated_critic_formula_gives_other_numbers(function: str, original: str, mutated: str) -> None:
    wrong = mutant(module, function, original, mutated)
    config, normalizer = ValueConfig(clip=0.2, loss_weight=0.5), Normalizer("sequences")
    loss = wrong.value_sums(VALUES, value_rows(), config, normalizer).loss.item()
    expected = (value_sums(VALUES, value_rows(), config, normalizer).loss.item(), variance_share(module, value_rows()))
    assert (loss, variance_share(wrong, value_rows())) != pytest.approx(expected)


def test_a_mutated_supervised_loss_counts_masked_tokens() -> None:
    wrong = mutant(module, "SupervisedObjective", "masked(-logprobs.full, mask)", "-logprobs.full")
    batch = random_batch([4, 6], 3)
    losses = [m.SupervisedObjective()(batch.logprobs(), batch.rows).loss.item() for m in (module, wrong)]
    assert losses[0] != pytest.approx(losses[1])
