from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, tensor

from grpo_engine.training.losses import clipped_policy_loss, k3, masked_sum
from grpo_engine.types import TrainRow, global_denominator


def float64(*values: float) -> Tensor:
    return tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "low", "high", "slope"),
    [
        (1.0, 2.0, -2.0, False, False, -2.0),
        (1.1, 2.0, -2.2, False, False, -2.0),
        (1.5, 2.0, -2.56, False, True, 0.0),  # -1.28 x 2: no more gradient upwards
        (1.5, -2.0, 3.0, False, False, 2.0),  # a bad token may still be pushed down
        (0.5, -2.0, 1.6, True, False, 0.0),  # 0.8 x 2: no more gradient downwards
        (0.5, 2.0, -1.0, False, False, -2.0),  # a good token may still be pushed up
        (3.0, 0.0, 0.0, False, False, 0.0),
    ],
)
def test_clipped_loss_by_hand(ratio: float, advantage: float, loss: float, low: bool, high: bool, slope: float) -> None:
    log_ratio = float64(math.log(ratio)).requires_grad_()
    terms = clipped_policy_loss(log_ratio, float64(advantage), clip_low=0.2, clip_high=0.28)
    terms.loss.sum().backward()
    assert terms.loss.item() == pytest.approx(loss, abs=1e-12)
    assert (terms.clipped_low.item(), terms.clipped_high.item()) == (low, high)
    assert log_ratio.grad is not None
    assert log_ratio.grad.item() == pytest.approx(slope * ratio, abs=1e-12)  # d ratio / d log ratio = ratio


def test_k3_by_hand_and_never_negative() -> None:
    # q/p = 1.5: 1.5 - ln 1.5 - 1
    assert k3(float64(math.log(1.5), 0.0)).tolist() == pytest.approx([0.5 - math.log(1.5), 0.0], abs=1e-15)
    assert (k3(torch.linspace(-8, 8, 1001, dtype=torch.float64)) >= 0).all()


def test_k3_keeps_its_digits_in_float32() -> None:
    assert k3(tensor([1e-3])).item() == pytest.approx(1e-3**2 / 2, rel=1e-2)


def test_k3_averages_to_the_kl_divergence() -> None:
    p, q = float64(0.5, 0.3, 0.2), float64(0.2, 0.5, 0.3)
    assert (p * k3((q / p).log())).sum().item() == pytest.approx((p * (p / q).log()).sum().item(), abs=1e-12)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_masked_token_passes_neither_value_nor_gradient(poison: float) -> None:
    values = float64(1.0, poison, 3.0).requires_grad_()
    total = masked_sum(values, tensor([True, False, True]))
    total.backward()
    assert total.item() == 4.0
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 0.0, 1.0]


def test_the_denominator_counts_exactly_the_unmasked_tokens() -> None:
    rows = [
        TrainRow([1], [2, 3, 4]),
        TrainRow([1], [2, 3], loss_mask=[True, False]),
        TrainRow([1], [2], loss_mask=[False]),
    ]
    assert global_denominator(rows) == 4.0


def test_a_step_without_trained_tokens_has_denominator_one() -> None:
    assert global_denominator([TrainRow([1], [2], loss_mask=[False])]) == global_denominator([]) == 1.0
