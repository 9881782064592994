"""The policy objective as a whole: against the naive oracle, and its invariants."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_engine.config_training import (
    AuxiliaryConfig,
    CISPOLoss,
    ClipLoss,
    CorrectionConfig,
    EntropyConfig,
    GSPOLoss,
    KLConfig,
)
from grpo_engine.model.logprobs import TokenLogprobs
from grpo_engine.training import objectives as module
from grpo_engine.training.objectives import PolicyObjective, Sums
from grpo_engine.types import Normalizer, TrainRow, global_denominator
from tests.unit.oracles.mutation import mutant
from tests.unit.oracles.objective import Batch, gradients, random_batch, total_loss

LOSSES: list[Any] = [
    ClipLoss(clip_high=0.28),
    ClipLoss(dual_clip=1.5),
    GSPOLoss(clip_low=0.1, clip_high=0.2),
    CISPOLoss(clip_high=0.28),
    CISPOLoss(clip_low=0.2),
]
NORMALIZERS = [Normalizer("tokens"), Normalizer("sequences"), Normalizer("constant", 16)]
KLS: list[Any] = [KLConfig(weight=0.1, estimator=e, unbiased=u) for e, u in product(("k1", "k2", "k3"), (False, True))]
KLS += [KLConfig(track=False), KLConfig(weight=0.1, place="reward")]
CORRECTIONS: list[Any] = [
    CorrectionConfig(),
    CorrectionConfig(kind="truncate", max_weight=1.3),
    CorrectionConfig(kind="mask", level="sequence", min_weight=0.5),
    CorrectionConfig(kind="mask", level="geometric", min_weight=0.8, max_weight=1.3),
]
FULL = PolicyObjective(
    temperature=1.0,
    loss=LOSSES[0],
    kl=KLConfig(weight=0.1),
    entropy=EntropyConfig(bonus=0.05, top_share=0.5),
    correction=CORRECTIONS[1],
    auxiliary=AuxiliaryConfig(weight=0.2),
    normalizer=NORMALIZERS[1],
)
objectives_ = st.builds(
    PolicyObjective,
    temperature=st.just(1.0),
    loss=st.sampled_from(LOSSES),
    kl=st.sampled_from(KLS),
    entropy=st.sampled_from([EntropyConfig(), EntropyConfig(bonus=0.05)]),
    correction=st.sampled_from(CORRECTIONS),
    auxiliary=st.builds(AuxiliaryConfig, weight=st.sampled_from([0.0, 0.2]), rows=st.sampled_from(["positive", "all"])),
    normalizer=st.sampled_from(NORMALIZERS),
    old_logprobs=st.sampled_from(["trainer", "sampler"]),
)
lengths_ = st.lists(st.integers(0, 6), min_size=1, max_size=5)
each_loss = pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.kind)
each_normalizer = pytest.mark.parametrize("normalizer", NORMALIZERS, ids=lambda normalizer: normalizer.kind)


def slopes(sums: Sums, logprobs: TokenLogprobs) -> list[float]:
    """Gradient of the loss by policy, full and entropy, one after another."""
    leaves = [logprobs.policy, logprobs.full, logprobs.entropy]
    found = torch.autograd.grad(sums.loss + sum(0 * leaf.sum() for leaf in leaves), leaves)
    return [float(entry) for column in found for entry in column]


def disagreement(implementation: Any, objective: Any, batch: Batch) -> float:
    """Largest difference of loss and gradient to the naive oracle."""
    logprobs = batch.logprobs()
    sums = implementation.PolicyObjective.__call__(objective, logprobs, batch.rows)
    pairs = zip(slopes(sums, logprobs), gradients(batch, objective), strict=True)
    worst = abs(sums.loss.item() - total_loss(batch, batch.policy, objective))
    return max([worst, *(abs(a - b) for a, b in pairs)])


@settings(deadline=None, max_examples=150)
@given(objective=objectives_, lengths=lengths_, seed=st.integers(0, 999), with_old=st.booleans())
def test_loss_and_gradient_equal_the_naive_oracle(
    objective: PolicyObjective, lengths: list[int], seed: int, with_old: bool
) -> None:
    assert disagreement(module, objective, random_batch(lengths, seed, with_old=with_old)) < 1e-6


MUTATIONS = [
    ("sampled if from_sampler else policy.detach()", "sampled"),
    ("sampled if from_sampler else policy.detach()", "policy"),
    ('"token_advantages", columns', '"ref_logprobs", columns'),
    ('mask & columns.flags("policy_mask")', "mask"),
    ("masked(terms.loss, chosen)", "terms.loss"),
    ("* weights.weight.to(policy.dtype)", ""),
    ("correction_weights(old - sampled,", "correction_weights(policy - sampled,"),
    ("part * token_weight", "part"),
    ("masked(policy - old, mask))", "masked(old - policy, mask))"),
    ("LossInputs(policy, old,", "LossInputs(logprobs.full, old,"),
    (
        'columns.numbers("ref_logprobs") - logprobs.full, mask)',
        'columns.numbers("ref_logprobs") - logprobs.policy, mask)',
    ),
    ('self.kl.place == "loss"', "True"),
    ("self.kl.weight * kl.kl_loss", "kl.kl_loss"),
    ("-self.entropy.bonus * masked", "self.entropy.bonus * masked"),
    ("every or row.advantage > 0", "True"),
    ("mask & of_rows", "of_rows"),
    ("-self.auxiliary.weight * masked(logprobs.policy", "-self.auxiliary.weight * masked(logprobs.full"),
]


@pytest.mark.parametrize(("original", "mutated"), MUTATIONS)
def test_a_mutated_objective_disagrees_with_the_oracle(original: str, mutated: str) -> None:
    wrong = mutant(module, "PolicyObjective", original, mutated)
    objectives = [FULL, replace(FULL, kl=KLConfig(weight=1, place="reward")), replace(FULL, kl=KLS[3])]
    worst = 0.0
    for objective, with_old in product(objectives, (True, False)):
        own = wrong.PolicyObjective(**{name: getattr(objective, name) for name in FULL.__dataclass_fields__})
        worst = max(worst, disagreement(wrong, own, random_batch([3, 5, 4, 6], 5, with_old=with_old)))
    assert worst > 1e-3


# ---------------------------------------------------------------- invariants
def tokens_of(batch: Batch, indices: Sequence[int]) -> list[int]:
    """Where the tokens of these rows lie in the batch's columns, row after row."""
    starts = [sum(len(row.completion_ids) for row in batch.rows[:index]) for index in range(len(batch.rows))]
    return [t for i in indices for t in range(starts[i], starts[i] + len(batch.rows[i].completion_ids))]


def step(objective: PolicyObjective, batch: Batch, groups: Sequence[Sequence[int]]) -> list[float]:
    """Loss and gradient of a step that is gone through in these groups of rows."""
    logprobs = batch.logprobs()
    total = torch.zeros((), dtype=torch.float64)
    for group in groups:
        at = tokens_of(batch, group)
        columns = (logprobs.policy[at], logprobs.full[at], logprobs.entropy[at], logprobs.correct[at])
        total = total + objective(TokenLogprobs(*columns), [batch.rows[index] for index in group]).loss
    loss = total / global_denominator(batch.rows, objective.normalizer)
    return [loss.item(), *slopes(replace(NO_SUMS, loss=loss), logprobs)]


NO_SUMS = Sums(torch.zeros(()), {})
SPLITS = [[[0], [1], [2], [3], [4]], [[4, 0], [2, 3, 1]], [[4, 3, 2, 1, 0]]]


@each_loss
@each_normalizer
@pytest.mark.parametrize("split", SPLITS)
def test_any_split_into_micro_batches_and_any_order_give_the_same_loss_and_gradient(
    loss: Any, normalizer: Normalizer, split: list[list[int]]
) -> None:
    objective = replace(FULL, loss=loss, normalizer=normalizer)
    batch = random_batch([4, 1, 6, 3, 5], 5)
    whole = step(objective, batch, [[0, 1, 2, 3, 4]])
    assert min(abs(whole[0]), max(map(abs, whole[1:]))) > 1e-3
    assert step(objective, batch, split) == pytest.approx(whole, rel=1e-9, abs=1e-12)


@each_loss
@each_normalizer
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_fully_masked_rows_give_zero_and_no_gradient(loss: Any, normalizer: Normalizer, poison: float) -> None:
    objective = replace(FULL, loss=loss, normalizer=normalizer, kl=KLConfig(weight=0.1, unbiased=True))
    batch = random_batch([3, 2], 1)
    rows = [replace(row, loss_mask=[False] * len(row.completion_ids), policy_mask=None) for row in batch.rows]
    bad = [poison] * 5
    logprobs = Batch(rows, bad, bad, bad).logprobs()
    sums = objective(logprobs, rows)
    assert sums.loss.item() == 0.0
    assert slopes(sums, logprobs) == [0.0] * 15
    assert {float(value) for value in (sums.stats | sums.parts | sums.maxima).values()} == {0.0}


@each_loss
def test_a_masked_row_beside_others_changes_nothing(loss: Any) -> None:
    objective = replace(FULL, loss=loss)
    batch = random_batch([4, 3], 7)
    alone = objective(
        Batch(batch.rows[:1], batch.policy[:4], batch.full[:4], batch.entropy[:4]).logprobs(), batch.rows[:1]
    )
    rows = [batch.rows[0], replace(batch.rows[1], loss_mask=[False] * 3)]
    beside = objective(Batch(rows, batch.policy, batch.full, batch.entropy).logprobs(), rows)
    assert beside.loss.item() == pytest.approx(alone.loss.item(), rel=1e-14)
    assert {k: float(v) for k, v in beside.stats.items()} == pytest.approx(
        {k: float(v) for k, v in alone.stats.items()}
    )


@each_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_ratio_is_exactly_one_without_old_logprobs(loss: Any, dtype: torch.dtype) -> None:
    batch = random_batch([4, 6, 2], 3, with_old=False)
    logprobs = batch.logprobs()
    cast = TokenLogprobs(
        logprobs.policy.to(dtype), logprobs.full.to(dtype), logprobs.entropy.to(dtype), logprobs.correct
    )
    sums = replace(FULL, loss=loss)(cast, batch.rows)
    trained = sum(row.num_trained_tokens for row in batch.rows)
    assert sums.stats["policy/ratio_mean"].item() == trained
    assert sums.maxima["policy/ratio_max"].item() == 1.0
    assert sums.stats["policy/clip_share"].item() == 0.0


def test_rows_with_and_without_old_logprobs_may_be_mixed() -> None:
    batch = random_batch([3, 4], 4)
    rows = [batch.rows[0], replace(batch.rows[1], old_logprobs=None)]
    assert disagreement(module, FULL, replace(batch, rows=rows)) < 1e-6


def test_correction_weights_stay_the_same_over_the_updates_of_a_batch() -> None:
    objective = replace(FULL, correction=CorrectionConfig(kind="mask", min_weight=0.8, max_weight=1.2))
    batch = random_batch([6, 6], 9)
    moved = replace(batch, policy=[value + 0.5 for value in batch.policy])
    first, later = objective(batch.logprobs(), batch.rows), objective(moved.logprobs(), batch.rows)
    for name in ("sampler/weight_mean", "sampler/masked_share", "sampler/logprob_gap_k3"):
        assert first.stats[name].item() == later.stats[name].item() > 0


def test_the_entropy_mask_changes_the_policy_term_alone() -> None:
    batch = random_batch([5, 4], 11)
    rows = [replace(row, policy_mask=[False] * len(row.completion_ids)) for row in batch.rows]
    masked, whole = FULL(batch.logprobs(), rows), FULL(batch.logprobs(), batch.rows)
    assert masked.parts["loss/policy"].item() == masked.stats["policy/clip_share"].item() == 0.0
    for name in ("loss/kl", "loss/entropy", "loss/auxiliary"):
        assert masked.parts[name].item() == whole.parts[name].item() != 0.0
    assert global_denominator(rows, FULL.normalizer) == global_denominator(batch.rows, FULL.normalizer)


# ---------------------------------------------------------------- expected gradients, by enumeration
LOGITS = torch.tensor([0.3, -1.2, 0.9], dtype=torch.float64)
REFERENCE, OLD = [-1.5, -0.7, -1.3], torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64).log()


def expected_gradient(objective: PolicyObjective, old: torch.Tensor | None, advantage: float = 0.0) -> list[float]:
    """By the logits of a policy over three tokens: each token's own loss, weighted with how often it is drawn."""
    logits = LOGITS.clone().requires_grad_()
    policy = logits.log_softmax(0)
    drawn_from = policy.detach() if old is None else old
    loss = torch.zeros((), dtype=torch.float64)
    for token in range(3):
        sampled = [drawn_from[token].item()]
        row = TrainRow([1], [token], advantage, sampled, None if old is None else sampled, [REFERENCE[token]])
        own = policy[token : token + 1]
        sums = objective(TokenLogprobs(own, own, own.detach(), own.detach() > 0), [row])
        loss = loss + drawn_from[token].exp() * sums.loss
    (slope,) = torch.autograd.grad(loss, logits)
    return [float(entry) for entry in slope]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("old", [None, OLD], ids=["on-policy", "off-policy"])
def test_the_unbiased_kl_of_the_objective_has_the_gradient_of_the_kl_itself(estimator: Any, old: Any) -> None:
    logits = LOGITS.clone().requires_grad_()
    policy = logits.log_softmax(0)
    divergence = (policy.exp() * (policy - torch.tensor(REFERENCE, dtype=torch.float64))).sum()
    (exact,) = torch.autograd.grad(divergence, logits)
    objective = PolicyObjective(temperature=1.0, kl=KLConfig(weight=1.0, estimator=estimator, unbiased=True))
    assert expected_gradient(objective, old) == pytest.approx(exact.tolist(), abs=1e-14)


def test_the_auxiliary_loss_on_all_rows_has_no_expected_gradient_on_policy() -> None:
    # That is why it is on completions of positive advantage by default.
    objective = PolicyObjective(temperature=1.0, auxiliary=AuxiliaryConfig(weight=1.0, rows="all"))
    assert expected_gradient(objective, None) == pytest.approx([0.0] * 3, abs=1e-15)
    assert max(map(abs, expected_gradient(objective, OLD))) > 0.1


@each_loss
def test_a_constant_advantage_has_no_expected_gradient_on_policy(loss: Any) -> None:
    assert expected_gradient(PolicyObjective(temperature=1.0, loss=loss), None, 1.7) == pytest.approx(
        [0.0] * 3, abs=1e-15
    )
