"""KL estimates: values by oracle and hand, gradients by exact enumeration of a small categorical policy."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, tensor

from grpo_engine.config_training import KLConfig, RLOOAdvantage
from grpo_engine.training import kl as module
from grpo_engine.training.advantages import group_advantages
from grpo_engine.training.kl import ESTIMATORS, k3, kl_estimate, kl_loss, token_kl
from tests.unit.oracles import losses as oracle
from tests.unit.oracles.mutation import mutant
from tests.unit.oracles.objective import slopes

GOLDEN = json.loads((Path(__file__).parent / "golden" / "losses.json").read_text())
each_estimator = pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
OPTIONS = list(product(("k1", "k2", "k3"), (False, True)))


def float64(values: Sequence[float]) -> Tensor:
    return tensor(values, dtype=torch.float64)


def disagreement(implementation: Any, count: int, seed: int) -> float:
    """Largest difference of values and of gradients by policy to the naive oracle, over all options."""
    draw = random.Random(seed)
    policy, reference, old = ([draw.uniform(-4, -0.1) for _ in range(count)] for _ in range(3))
    worst = 0.0
    for estimator, unbiased in OPTIONS:
        leaf = float64(policy).requires_grad_()
        loss = implementation.kl_loss(float64(reference) - leaf, leaf - float64(old), estimator, unbiased=unbiased)
        (slope,) = torch.autograd.grad(loss.sum(), leaf)

        def total(values: list[float], options: tuple[str, bool] = (estimator, unbiased)) -> float:
            rows = zip(values, policy, reference, old, strict=True)
            return sum(oracle.kl(p, r, p - o, frozen - o, *options) for p, frozen, r, o in rows)

        worst = max(worst, abs(loss.sum().item() - total(policy)))
        worst = max(worst, *(abs(a - b) for a, b in zip(slope.tolist(), slopes(total, policy), strict=True)))
        values = [implementation.token_kl(p, r, estimator) for p, r in zip(policy, reference, strict=True)]
        naive = [oracle.kl(p, r, 0.0, 0.0, estimator, False) for p, r in zip(policy, reference, strict=True)]
        worst = max(worst, *(abs(a - b) for a, b in zip(values, naive, strict=True)))
    return worst


@settings(deadline=None, max_examples=20)
@given(count=st.integers(1, 8), seed=st.integers(0, 999))
def test_every_option_equals_its_naive_oracle(count: int, seed: int) -> None:
    assert disagreement(module, count, seed) < 1e-6


MUTATIONS = [
    ("k1", "-x", "x"),
    ("k2", "/ 2", "/ 1"),
    ("k3", "- x", "+ x"),
    ("k3", "torch.expm1(x)", "torch.expm1(-x)"),
    ("kl_loss", "if not unbiased", "if unbiased"),
    ("kl_loss", "weight.detach() if", "weight if"),
    ("kl_loss", "else weight", "else weight.detach()"),
    ("kl_loss", "policy_change.exp()", "(-policy_change).exp()"),
    ("token_kl", "reference - policy", "policy - reference"),
    ("token_kl", "x * x / 2", "x * x"),
    ("token_kl", "math.expm1(x) - x", "math.expm1(x)"),
]


@pytest.mark.parametrize(("function", "original", "mutated"), MUTATIONS)
def test_a_mutated_formula_disagrees_with_the_oracle(function: str, original: str, mutated: str) -> None:
    assert disagreement(mutant(module, function, original, mutated), 5, 0) > 1e-2


def test_every_estimator_of_the_config_has_a_function() -> None:
    assert set(ESTIMATORS) == set(get_args(KLConfig.model_fields["estimator"].annotation))


@each_estimator
def test_golden_values(estimator: str) -> None:
    x = float64(GOLDEN["reference"]) - float64(GOLDEN["policy"])
    assert kl_estimate(x, estimator).tolist() == pytest.approx(GOLDEN[estimator], rel=1e-14)


def test_estimates_by_hand() -> None:
    x = float64([math.log(1.5), 0.0])  # the reference finds the token 1.5 times as likely
    assert kl_estimate(x, "k1").tolist() == pytest.approx([-math.log(1.5), 0.0])
    assert kl_estimate(x, "k2").tolist() == pytest.approx([math.log(1.5) ** 2 / 2, 0.0])
    assert kl_estimate(x, "k3").tolist() == pytest.approx([0.5 - math.log(1.5), 0.0])
    assert token_kl(-1.0, -1.5, "k1") == 0.5
    assert token_kl(-800.0, -1.0, "k3") == math.inf


def test_k3_keeps_its_digits_in_float32() -> None:
    assert k3(tensor([1e-3])).item() == pytest.approx(1e-3**2 / 2, rel=1e-2)
    assert (k3(torch.linspace(-8, 8, 1001)) >= 0).all()


def test_an_explosion_is_not_clamped_away() -> None:
    assert kl_estimate(tensor([200.0]), "k3").item() == math.inf


# ---------------------------------------------------------------- gradients by exact enumeration
LOGITS = float64([0.3, -1.2, 0.9, 0.1])
REFERENCE = float64([0.1, 0.4, 0.2, 0.3]).log()
OLD = float64([0.25, 0.25, 0.3, 0.2]).log()


def exact_gradient() -> list[float]:
    """Of KL(policy || reference) by the logits."""
    logits = LOGITS.clone().requires_grad_()
    policy = logits.log_softmax(0)
    (policy.exp() * (policy - REFERENCE)).sum().backward()
    return gradient_of(logits)


def expected_gradient(estimator: str, *, unbiased: bool, old: Tensor | None = None) -> list[float]:
    """Of the estimate, over tokens drawn from `old`, or from the policy itself; each token's gradient enters with its
    probability."""
    logits = LOGITS.clone().requires_grad_()
    policy = logits.log_softmax(0)
    drawn_from = policy.detach() if old is None else old
    loss = kl_loss(REFERENCE - policy, policy - drawn_from, estimator, unbiased=unbiased)
    (drawn_from.exp() * loss).sum().backward()
    return gradient_of(logits)


def gradient_of(logits: Tensor) -> list[float]:
    assert logits.grad is not None
    return [float(entry) for entry in logits.grad]


def test_k1_in_the_loss_has_no_gradient_on_policy() -> None:
    assert expected_gradient("k1", unbiased=False) == pytest.approx([0.0] * 4, abs=1e-15)


def test_k2_in_the_loss_has_exactly_the_gradient_of_the_kl_on_policy() -> None:
    assert expected_gradient("k2", unbiased=False) == pytest.approx(exact_gradient(), abs=1e-15)


def test_k3_in_the_loss_has_another_gradient() -> None:
    found = expected_gradient("k3", unbiased=False)
    forward = LOGITS.softmax(0) - REFERENCE.exp()  # that of KL(reference || policy)
    assert found == pytest.approx(forward.tolist(), abs=1e-15)
    assert max(abs(a - b) for a, b in zip(found, exact_gradient(), strict=True)) > 0.01


@each_estimator
@pytest.mark.parametrize("old", [None, OLD], ids=["on-policy", "off-policy"])
def test_the_unbiased_options_have_exactly_the_gradient_of_the_kl(estimator: str, old: Tensor | None) -> None:
    assert expected_gradient(estimator, unbiased=True, old=old) == pytest.approx(exact_gradient(), abs=1e-14)


def test_off_policy_no_plain_estimate_has_the_gradient_of_the_kl() -> None:
    for estimator in ESTIMATORS:
        found = expected_gradient(estimator, unbiased=False, old=OLD)
        assert max(abs(a - b) for a, b in zip(found, exact_gradient(), strict=True)) > 0.01


def score_function_gradient(advantage: Callable[[tuple[int, ...]], list[float]], group_size: int) -> list[float]:
    """Expected policy gradient over all groups of `group_size` tokens drawn from the policy."""
    logits = LOGITS.clone().requires_grad_()
    policy = logits.log_softmax(0)
    loss = tensor(0.0, dtype=torch.float64)
    for group in product(range(4), repeat=group_size):
        probability = math.prod(math.exp(policy[token].item()) for token in group)
        terms = [-a * policy[token] for a, token in zip(advantage(group), group, strict=True)]
        loss = loss + probability * sum(terms) / group_size
    loss.backward()
    return gradient_of(logits)


def test_k1_in_the_reward_has_exactly_the_gradient_of_the_kl() -> None:
    policy = LOGITS.log_softmax(0).tolist()

    def advantage(group: tuple[int, ...]) -> list[float]:
        rewards = [-token_kl(policy[token], REFERENCE[token].item(), "k1") for token in group]
        return group_advantages(rewards, RLOOAdvantage())

    assert score_function_gradient(advantage, 2) == pytest.approx(exact_gradient(), abs=1e-14)


def test_a_next_token_loss_on_all_samples_has_no_gradient_on_policy_and_on_the_better_ones_it_has() -> None:
    assert score_function_gradient(lambda group: [1.0] * len(group), 1) == pytest.approx([0.0] * 4, abs=1e-15)
    only_good = score_function_gradient(lambda group: [float(token == 2) for token in group], 1)
    assert only_good[2] < -0.1  # descending raises the good token's logit
