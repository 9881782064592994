from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, tensor

from grpo_engine.config_training import CorrectionConfig
from grpo_engine.training import correction as module
from grpo_engine.training.correction import Correction, correction_weights
from tests.unit.oracles import losses as oracle
from tests.unit.oracles.mutation import mutant

BOUNDS = {"min_weight": 0.7, "max_weight": 1.4}
OPTIONS: list[tuple[Any, Any]] = [
    (kind, level)
    for kind, level in product(("none", "truncate", "mask"), ("token", "sequence", "geometric"))
    if (kind, level) != ("truncate", "geometric")
]
TIGHT = {"min_weight": 0.9, "max_weight": 1.1}  # for means, which spread less
CONFIGS = [
    CorrectionConfig(kind=kind, level=level, **(TIGHT if level == "geometric" else BOUNDS)) for kind, level in OPTIONS
]
each_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.kind}-{config.level}")


def rows_of(lengths: Sequence[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), tensor(lengths))


def weights(gaps: Sequence[float], config: CorrectionConfig, mask: Sequence[bool] | None = None) -> Correction:
    """Of one row."""
    on = tensor([True] * len(gaps) if mask is None else mask)
    return correction_weights(tensor(gaps, dtype=torch.float64), on, rows_of([len(gaps)]), 1, config)


def disagreement(implementation: Any, config: CorrectionConfig, lengths: list[int], seed: int) -> float:
    """Largest difference to the naive oracle over trained tokens."""
    draw = random.Random(seed)
    gaps = [draw.gauss(0, 0.4) for _ in range(sum(lengths))]
    mask = [draw.random() < 0.8 for _ in gaps]
    gap_N = tensor(gaps, dtype=torch.float64)
    found = implementation.correction_weights(gap_N, tensor(mask), rows_of(lengths), len(lengths), config)
    expected: list[float] = []
    for index, length in enumerate(lengths):
        row = slice(sum(lengths[:index]), sum(lengths[:index]) + length)
        expected += oracle.correction(gaps[row], mask[row], config)
    triples = zip(found.weight.tolist(), expected, found.dropped.tolist(), mask, strict=True)
    return max([abs(a - b) + abs(gone - (config.kind == "mask" and b == 0)) for a, b, gone, on in triples if on] + [0])


@each_config
@settings(deadline=None, max_examples=25)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5), seed=st.integers(0, 999))
def test_every_option_equals_its_naive_oracle(config: CorrectionConfig, lengths: list[int], seed: int) -> None:
    assert disagreement(module, config, lengths, seed) < 1e-12


MUTATIONS = [
    ("_log_weight", 'level == "sequence"', 'level != "sequence"'),
    ("_log_weight", "row_means(gap, mask,", "row_means(gap, mask | True,"),
    ("correction_weights", ".exp()", ""),
    ("correction_weights", "weight.clamp(config.min_weight, config.max_weight)", "weight.clamp(max=config.max_weight)"),
    ("correction_weights", "(weight < config.min_weight) |", ""),
    ("correction_weights", "| (weight > config.max_weight)", ""),
    ("correction_weights", 'if config.level == "geometric" else weight', ""),
    ("correction_weights", 'if config.kind == "truncate":', "if True:"),
    ("correction_weights", "masked(gap.detach().double(), mask)", "gap.detach().double()"),
]


@pytest.mark.parametrize(("function", "original", "mutated"), MUTATIONS)
def test_a_mutated_formula_disagrees_with_the_oracle(function: str, original: str, mutated: str) -> None:
    wrong = mutant(module, function, original, mutated)
    assert max(disagreement(wrong, c, [1, 4, 6, 2, 5], seed) for c in CONFIGS for seed in range(4)) > 1e-2


def test_token_weights_by_hand() -> None:
    gaps = [math.log(2), math.log(0.5), 0.0]
    truncated = weights(gaps, CorrectionConfig(kind="truncate", **BOUNDS))
    assert truncated.weight.tolist() == pytest.approx([1.4, 0.7, 1.0])
    assert truncated.dropped.tolist() == [False] * 3
    dropped = weights(gaps, CorrectionConfig(kind="mask", **BOUNDS))
    assert dropped.weight.tolist() == pytest.approx([0.0, 0.0, 1.0])
    assert dropped.dropped.tolist() == [True, True, False]


def test_sequence_weights_are_products_and_geometric_ones_only_decide() -> None:
    gaps = [math.log(1.2), math.log(1.25)]  # product 1.5, geometric mean 1.22
    product_of = CorrectionConfig(kind="truncate", level="sequence", **BOUNDS)
    assert weights(gaps, product_of).weight.tolist() == pytest.approx([1.4, 1.4])
    geometric = CorrectionConfig(kind="mask", level="geometric", **BOUNDS)
    assert weights(gaps, geometric).weight.tolist() == [1.0, 1.0]
    assert weights([0.5, 0.5], geometric).weight.tolist() == [0.0, 0.0]


def test_the_geometric_mean_has_no_length_bias_that_the_product_has() -> None:
    gaps = [0.002] * 500
    product_of = weights(gaps, CorrectionConfig(kind="mask", level="sequence"))
    assert product_of.weight.sum().item() == 0.0  # e > 2
    assert weights(gaps, CorrectionConfig(kind="mask", level="geometric")).weight.sum().item() == 500.0


@each_config
def test_weights_carry_no_gradient(config: CorrectionConfig) -> None:
    gap = tensor([0.1, -0.2], dtype=torch.float64, requires_grad=True)
    found = correction_weights(gap, tensor([True, True]), rows_of([2]), 1, config)
    assert not found.weight.requires_grad


@each_config
def test_a_masked_token_enters_no_sum(config: CorrectionConfig) -> None:
    mask = [True, False, True]
    poisoned, clean = weights([0.1, math.nan, 0.2], config, mask), weights([0.1, 5.0, 0.2], config, mask)
    assert poisoned.weight.tolist() == clean.weight.tolist()
    assert poisoned.weight.isfinite().all()
    assert not poisoned.dropped[1]


@pytest.mark.parametrize("config", CONFIGS[3:], ids=lambda config: f"{config.kind}-{config.level}")
def test_a_broken_sampler_is_not_silently_dropped(config: CorrectionConfig) -> None:
    found = weights([0.1, math.nan], config)
    assert found.weight[1].isnan()
    assert not found.dropped[1]


def test_equal_distributions_have_weight_exactly_one() -> None:
    for config in CONFIGS:
        assert weights([0.0] * 7, config).weight.tolist() == [1.0] * 7
