from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, tensor

from grpo_engine.config_training import CISPOLoss, ClipLoss, GSPOLoss, LossConfig
from grpo_engine.training import losses as module
from grpo_engine.training.losses import LOSSES, LossInputs, LossTerms, clipped_value_loss, masked
from grpo_engine.types import Normalizer, TrainRow, global_denominator
from tests.unit.oracles import losses as oracle
from tests.unit.oracles.mutation import mutant
from tests.unit.oracles.objective import slopes

GOLDEN = json.loads((Path(__file__).parent / "golden" / "losses.json").read_text())
CONFIGS: dict[str, Any] = {
    "clip": ClipLoss(clip_high=0.28),
    "dual_clip": ClipLoss(clip_high=0.28, dual_clip=1.5),
    "gspo": GSPOLoss(),
    "gspo_wide": GSPOLoss(clip_low=0.2, clip_high=0.3),
    "cispo": CISPOLoss(clip_high=0.28),
    "cispo_low": CISPOLoss(clip_low=0.1, clip_high=0.28),
}
each_config = pytest.mark.parametrize("name", CONFIGS)


def float64(values: Sequence[float]) -> Tensor:
    return tensor(values, dtype=torch.float64)


def inputs(policy: Tensor, old: Tensor, advantage: Tensor, mask: Tensor, lengths: Sequence[int]) -> LossInputs:
    row_N = torch.repeat_interleave(torch.arange(len(lengths)), tensor(lengths))
    return LossInputs(policy, old, advantage, mask, row_N, len(lengths))


def terms(name: str, log_ratios: Sequence[float], advantages: Sequence[float]) -> tuple[LossTerms, Tensor]:
    """Of one fully trained row with old log-probabilities -1, and the leaf of the policy's."""
    leaf = (float64(log_ratios) - 1).requires_grad_()
    mask = torch.ones(len(log_ratios), dtype=torch.bool)
    batch = inputs(leaf, -torch.ones_like(leaf), float64(advantages), mask, [len(log_ratios)])
    return LOSSES[CONFIGS[name].kind](batch, CONFIGS[name]), leaf


def disagreement(implementation: Any, config: Any, lengths: list[int], seed: int) -> float:
    """Largest difference of any token's loss and of its sum's gradient to the naive oracle."""
    draw = random.Random(seed)
    count = sum(lengths)
    policy = [draw.uniform(-4, -0.1) for _ in range(count)]
    old, advantage = [p + draw.gauss(0, 0.5) for p in policy], [draw.gauss(0, 1) for _ in range(count)]
    mask = [draw.random() < 0.8 for _ in range(count)]

    def naive(values: list[float]) -> list[float]:
        found: list[float] = []
        for index, length in enumerate(lengths):
            row = slice(sum(lengths[:index]), sum(lengths[:index]) + length)
            found += oracle.row_losses(values[row], policy[row], old[row], advantage[row], mask[row], config)
        return found

    leaf = float64(policy).requires_grad_()
    batch = inputs(leaf, float64(old), float64(advantage), tensor(mask), lengths)
    loss = implementation.LOSSES[config.kind](batch, config).loss
    (slope,) = torch.autograd.grad((loss + 0 * leaf).sum(), leaf)  # some mutants have no gradient
    pairs = [*zip(loss.tolist(), naive(policy), strict=True)]
    pairs += zip(slope.tolist(), slopes(lambda values: sum(naive(values)), policy), strict=True)
    return max(abs(a - b) for a, b in pairs)


@each_config
@settings(deadline=None, max_examples=30)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4), seed=st.integers(0, 999))
def test_every_loss_and_its_gradient_equal_the_naive_oracle(name: str, lengths: list[int], seed: int) -> None:
    assert disagreement(module, CONFIGS[name], lengths, seed) < 1e-6


MUTATIONS = [
    ("clip_loss", "inputs.policy - inputs.old", "inputs.old - inputs.policy"),
    ("clip_loss", "config.clip_low, config.clip_high,", "config.clip_high, config.clip_low,"),
    ("clip_loss", "config.dual_clip)", "None)"),
    ("_clipped_surrogate", "-torch.minimum", "-torch.maximum"),
    ("_clipped_surrogate", "ratio.clamp(1 - clip_low, 1 + clip_high)", "ratio"),
    ("_clipped_surrogate", "torch.minimum(loss, -dual_clip * advantage)", "-dual_clip * advantage"),
    ("_clipped_surrogate", "torch.where(advantage < 0,", "torch.where(advantage > 0,"),
    ("gspo_loss", "row_means(log_ratio, inputs.mask,", "row_means(log_ratio, inputs.mask | True,"),
    ("gspo_loss", "inputs.num_rows)[inputs.row_N]", "inputs.num_rows)[inputs.row_N].detach()"),
    ("gspo_loss", "masked(log_sequence, inputs.mask)", "masked(log_ratio, inputs.mask)"),
    ("row_means", " / count.clamp(min=1)", ""),
    ("cispo_loss", ".exp().detach()", ".exp()"),
    ("cispo_loss", "1 + config.clip_high", "config.clip_high"),
    ("cispo_loss", "1 - config.clip_low", "config.clip_low"),
    ("cispo_loss", "* masked(inputs.policy, inputs.mask)", ""),
    ("masked", "torch.zeros_like(values)", "values"),
]


@pytest.mark.parametrize(("function", "original", "mutated"), MUTATIONS)
def test_a_mutated_formula_disagrees_with_the_oracle(function: str, original: str, mutated: str) -> None:
    wrong = mutant(module, function, original, mutated)
    assert max(disagreement(wrong, c, [3, 5, 4, 2], seed) for c in CONFIGS.values() for seed in range(4)) > 1e-3


@pytest.mark.parametrize(
    ("key", "config"),
    [
        ("clip", ClipLoss(clip_high=0.28)),
        ("dual_clip", ClipLoss(clip_high=0.28, dual_clip=3)),
        ("gspo", GSPOLoss()),
        ("cispo", CISPOLoss(clip_high=0.28)),
    ],
)
def test_golden_values(key: str, config: Any) -> None:
    policy, old, advantage = (float64(GOLDEN[name]) for name in ("policy", "old", "advantage"))
    batch = inputs(policy, old, advantage, torch.ones_like(policy).bool(), [len(policy)])
    assert LOSSES[config.kind](batch, config).loss.tolist() == pytest.approx(GOLDEN[key], rel=1e-14)


def test_every_kind_of_config_has_a_loss() -> None:
    assert set(LOSSES) == {config.model_fields["kind"].default for config in get_args(get_args(LossConfig)[0])}


# ---------------------------------------------------------------- by hand
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
    found, leaf = terms("clip", [math.log(ratio)], [advantage])
    found.loss.sum().backward()
    assert found.loss.item() == pytest.approx(loss, abs=1e-12)
    assert (found.clipped_low.item(), found.clipped_high.item()) == (low, high)
    assert leaf.grad is not None
    assert leaf.grad.item() == pytest.approx(slope * ratio, abs=1e-12)  # d ratio / d log ratio = ratio


def test_dual_clip_bounds_the_loss_of_bad_tokens_alone() -> None:
    found, leaf = terms("dual_clip", [math.log(4)] * 2, [-2.0, 2.0])  # at most 1.5 |A|
    found.loss.sum().backward()
    assert found.loss.tolist() == pytest.approx([3.0, -2.56])
    assert found.clipped_high.tolist() == [True, True]
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [0.0, 0.0]


def test_gspo_takes_the_geometric_mean_of_the_rows_ratios() -> None:
    found, leaf = terms("gspo_wide", [math.log(1.44), 0.0], [1.0, 1.0])  # sqrt(1.44 x 1) = 1.2
    found.loss.mean().backward()
    assert found.ratio.tolist() == pytest.approx([1.2, 1.2])
    assert found.loss.tolist() == pytest.approx([-1.2, -1.2])
    assert leaf.grad is not None
    assert leaf.grad.tolist() == pytest.approx([-0.6, -0.6])  # s A / |y| for every token
    clipped, _ = terms("gspo_wide", [math.log(4), 0.0], [1.0, -1.0])  # s = 2
    assert clipped.clipped_high.tolist() == [True, False]


def test_cispo_cuts_weights_at_one_plus_clip_high_and_keeps_every_gradient() -> None:
    found, leaf = terms("cispo_low", [math.log(3), math.log(0.5), 0.0], [2.0, -1.0, 1.0])
    found.loss.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == pytest.approx([-1.28 * 2, 0.9, -1.0])
    assert found.clipped_high.tolist() == [True, False, False]
    assert found.clipped_low.tolist() == [False, True, False]
    assert CISPOLoss().clip_high + 1 == 5.0  # TRL's epsilon_high 5.0


@each_config
def test_on_policy_every_loss_has_the_gradient_of_reinforce(name: str) -> None:
    advantages = [0.7, -1.3, 0.2, 0.0]
    found, leaf = terms(name, [0.0] * 4, advantages)
    found.loss.sum().backward()
    assert found.ratio.tolist() == [1.0] * 4
    assert leaf.grad is not None
    expected = [-sum(advantages) / 4] * 4 if name.startswith("gspo") else [-a for a in advantages]
    assert leaf.grad.tolist() == pytest.approx(expected, abs=1e-15)


# ---------------------------------------------------------------- masks and explosions
@each_config
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_masked_token_passes_neither_value_nor_gradient(name: str, poison: float) -> None:
    policy, old = float64([-1.0, poison, -2.0, poison]).requires_grad_(), float64([-1.1, -1.0, poison, poison])
    mask, advantage = tensor([True, False, False, False]), float64([1.0, 1.0, poison, 1.0])
    found = LOSSES[CONFIGS[name].kind](inputs(policy, old, advantage, mask, [3, 1]), CONFIGS[name])
    found.loss.sum().backward()
    assert found.loss.isfinite().all()
    assert found.loss[1:].tolist() == [0.0] * 3
    assert policy.grad is not None
    assert policy.grad.isfinite().all()
    assert policy.grad[1:].tolist() == [0.0] * 3


def test_an_exploded_ratio_is_not_clamped_away() -> None:
    found, _ = terms("clip", [50.0], [-1.0])
    assert found.loss.item() == pytest.approx(math.exp(50))
    assert terms("clip", [800.0], [-1.0])[0].loss.item() == math.inf


def test_masked_sums_ignore_what_is_masked() -> None:
    values = float64([1.0, math.nan, 3.0]).requires_grad_()
    total = masked(values, tensor([True, False, True])).sum()
    total.backward()
    assert total.item() == 4.0
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 0.0, 1.0]


# ---------------------------------------------------------------- denominators
ROWS = [
    TrainRow([1], [2, 3, 4]),
    TrainRow([1], [2, 3], loss_mask=[True, False]),
    TrainRow([1], [2], loss_mask=[False]),
]


def test_the_denominator_counts_exactly_what_the_sum_holds() -> None:
    assert global_denominator(ROWS) == 4.0
    assert global_denominator(ROWS, Normalizer("sequences")) == 2.0
    assert global_denominator(ROWS, Normalizer("constant", 8)) == 3.0
    assert global_denominator(ROWS, Normalizer("constant", 8), num_sampled=5) == 5.0


def test_token_weights_by_hand() -> None:
    assert [Normalizer("sequences").token_weight(row) for row in ROWS] == [1 / 3, 1.0, 1.0]
    assert [Normalizer("constant", 8).token_weight(row) for row in ROWS] == [1 / 8] * 3
    assert [Normalizer().token_weight(row) for row in ROWS] == [1.0] * 3


@pytest.mark.parametrize("kind", ["tokens", "sequences", "constant"])
def test_a_step_without_trained_tokens_has_a_denominator_of_at_least_one(kind: Any) -> None:
    assert global_denominator([TrainRow([1], [2], loss_mask=[False])], Normalizer(kind, 4)) == 1.0
    assert global_denominator([], Normalizer(kind, 4)) == 1.0


# ---------------------------------------------------------------- critic
VALUE_CASES = [  # value, old, return, clip, loss, clipped
    (0.5, 0.5, 1.0, 0.2, 0.125, False),
    (1.0, 0.5, 1.0, 0.2, 0.045, True),  # bounded to 0.7: (0.3)² / 2 exceeds 0
    (0.0, 0.5, 1.0, 0.2, 0.5, False),  # bounded to 0.3: 0.245, the plain loss is larger
    (1.0, 0.5, 1.0, None, 0.0, False),
]


@pytest.mark.parametrize(("value", "old", "target", "clip", "loss", "clipped"), VALUE_CASES)
def test_value_loss_by_hand(
    value: float, old: float, target: float, clip: float | None, loss: float, clipped: bool
) -> None:
    found, flag = clipped_value_loss(float64([value]), float64([old]), float64([target]), clip)
    assert found.item() == pytest.approx(loss)
    assert flag.item() == clipped
    assert oracle.value_loss(value, old, target, clip) == pytest.approx(loss)


def value_disagreement(implementation: Any, seed: int, clip: float | None) -> float:
    draw = random.Random(seed)
    values, old, targets = ([draw.gauss(0, 0.5) for _ in range(12)] for _ in range(3))
    leaf = float64(values).requires_grad_()
    loss, _ = implementation.clipped_value_loss(leaf, float64(old), float64(targets), clip)
    (slope,) = torch.autograd.grad(loss.sum(), leaf)

    def naive(at: list[float]) -> float:
        return sum(oracle.value_loss(v, o, t, clip) for v, o, t in zip(at, old, targets, strict=True))

    worst = max(abs(a - b) for a, b in zip(slope.tolist(), slopes(naive, values), strict=True))
    return max(worst, abs(loss.sum().item() - naive(values)))


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 999), clip=st.sampled_from([None, 0.1, 0.4]))
def test_value_loss_equals_its_naive_oracle(seed: int, clip: float | None) -> None:
    assert value_disagreement(module, seed, clip) < 1e-6


VALUE_MUTATIONS = [
    ("torch.maximum(plain, bounded)", "torch.minimum(plain, bounded)"),
    ("plain = (values - returns).square() / 2", "plain = (values - returns).square()"),
    ("old - clip, old + clip", "returns - clip, returns + clip"),
]


@pytest.mark.parametrize(("original", "mutated"), VALUE_MUTATIONS)
def test_a_mutated_value_loss_disagrees_with_the_oracle(original: str, mutated: str) -> None:
    assert value_disagreement(mutant(module, "clipped_value_loss", original, mutated), 0, 0.2) > 1e-2
