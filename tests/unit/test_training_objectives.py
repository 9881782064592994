"""Loss and gradient against a naive oracle: one row at a time, one token at a time, plain formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from grpo_engine.model.logprobs import LogprobForward, TokenLogprobs
from grpo_engine.training import losses, objectives
from grpo_engine.training.objectives import SupervisedObjective
from grpo_engine.types import TrainRow, global_denominator
from tests.unit.training_fixtures import POLICY, gradients, learner, ragged_rows, tiny_llama


def token_loss(logits: Tensor, row: TrainRow, t: int) -> Tensor:
    """The GRPO loss of one token as the papers write it."""
    scaled, token = logits / 0.7, row.completion_ids[t]
    full = scaled[token] - torch.logsumexp(scaled, 0)
    kept = scaled if row.kept_ids is None else scaled[row.kept_ids[t]]
    assert row.ref_logprobs is not None
    old = (row.old_logprobs or row.rollout_logprobs or [])[t]
    ratio = torch.exp(scaled[token] - torch.logsumexp(kept, 0) - old)
    clipped = min(max(ratio, ratio.new_tensor(0.8)), ratio.new_tensor(1.28))
    reference_over_policy = torch.exp(row.ref_logprobs[t] - full)
    kl = reference_over_policy - torch.log(reference_over_policy) - 1
    return -min(ratio * row.advantage, clipped * row.advantage) + 0.1 * kl


def oracle(model: LlamaForCausalLM, rows: list[TrainRow]) -> tuple[float, dict[str, Tensor]]:
    """Mean loss over all trained tokens and its gradient."""
    model.zero_grad()
    terms = []
    for row in rows:
        logits = model(torch.tensor([row.prompt_ids + row.completion_ids])).logits[0]
        for t in range(len(row.completion_ids)):
            if row.loss_mask is None or row.loss_mask[t]:
                terms.append(token_loss(logits[len(row.prompt_ids) - 1 + t], row, t))
    loss = torch.stack(terms).sum() / len(terms)
    loss.backward()
    found = gradients(model)
    model.zero_grad()
    return loss.item(), found


def near_policy_rows(**options: Any) -> list[TrainRow]:
    """Rows whose old log-probabilities lie near the model's, so that ratios fall inside and outside the clip range."""
    rows = ragged_rows(**options)
    scores = learner(tiny_llama()).logprobs(rows)
    noise = torch.Generator().manual_seed(1)

    def near(values: list[float]) -> list[float]:
        return (torch.tensor(values) + 0.4 * torch.randn(len(values), generator=noise)).tolist()

    return [replace(row, old_logprobs=near(s), ref_logprobs=near(s)) for row, s in zip(rows, scores, strict=True)]


def disagreement(rows: list[TrainRow], denominator: float | None = None) -> float:
    """Largest difference between learner and oracle over loss and every gradient entry, relative to the largest."""
    model = tiny_llama()
    expected_loss, expected = oracle(model, rows)
    stats = learner(model).accumulate(rows, denominator or global_denominator(rows))
    found = gradients(model)
    largest = max(float(g.abs().max()) for g in expected.values())
    worst = max(float((found[name] - expected[name]).abs().max()) for name in expected)
    return max(worst / largest, abs(stats["loss"] - expected_loss))


@pytest.mark.parametrize("kept", [False, True])
def test_loss_and_gradient_equal_the_oracle(kept: bool) -> None:
    assert disagreement(near_policy_rows(kept=kept)) < 1e-9


def test_without_old_logprobs_the_ratio_is_against_the_rollout() -> None:
    rows = [replace(row, rollout_logprobs=row.old_logprobs, old_logprobs=None) for row in near_policy_rows()]
    assert disagreement(rows) < 1e-9


CLIP, FORWARD = losses.clipped_policy_loss, LogprobForward.__call__


def unclipped(log_ratio: Tensor, advantage: Tensor, **_: float) -> losses.PolicyLoss:
    return CLIP(log_ratio, advantage, clip_low=0.999, clip_high=1e9)


def swapped_bounds(log_ratio: Tensor, advantage: Tensor, *, clip_low: float, clip_high: float) -> losses.PolicyLoss:
    return CLIP(log_ratio, advantage, clip_low=clip_high, clip_high=clip_low)


def inverted_ratio(log_ratio: Tensor, advantage: Tensor, **clip: float) -> losses.PolicyLoss:
    return CLIP(-log_ratio, advantage, **clip)


def wrong_sign(log_ratio: Tensor, advantage: Tensor, **clip: float) -> losses.PolicyLoss:
    return CLIP(log_ratio, -advantage, **clip)


def no_temperature(self: LogprobForward, batch: Any, _: float) -> TokenLogprobs:
    return FORWARD(self, batch, 1.0)


def kept_ignored(self: LogprobForward, batch: Any, temperature: float) -> TokenLogprobs:
    return FORWARD(self, replace(batch, kept_ids=None), temperature)


def kl_on_truncated(self: LogprobForward, batch: Any, temperature: float) -> TokenLogprobs:
    out = FORWARD(self, batch, temperature)
    return replace(out, full=out.policy)


def shifted_by_one(self: LogprobForward, batch: Any, temperature: float) -> TokenLogprobs:
    return FORWARD(self, replace(batch, position_N=(batch.position_N - 1).clamp(min=0)), temperature)


@pytest.mark.parametrize(
    ("owner", "name", "mutant"),
    [
        (losses, "clipped_policy_loss", unclipped),
        (losses, "clipped_policy_loss", swapped_bounds),
        (losses, "clipped_policy_loss", inverted_ratio),
        (losses, "clipped_policy_loss", wrong_sign),
        (losses, "k3", lambda x: -x),
        (losses, "k3", lambda x: torch.expm1(-x) + x),
        (losses, "k3", lambda x: x**2 / 2),
        (losses, "masked_sum", lambda values, mask: values.sum()),
        (objectives, "loss_mask", lambda rows, like: torch.ones_like(like).bool()),
        (LogprobForward, "__call__", no_temperature),
        (LogprobForward, "__call__", kept_ignored),
        (LogprobForward, "__call__", kl_on_truncated),
        (LogprobForward, "__call__", shifted_by_one),
    ],
)
def test_a_wrong_formula_disagrees_with_the_oracle(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, mutant: Callable[..., Any]
) -> None:
    rows = near_policy_rows(kept=True)
    monkeypatch.setattr(owner, name, mutant)
    assert disagreement(rows) > 1e-3


def test_a_denominator_that_counts_masked_tokens_disagrees() -> None:
    rows = near_policy_rows()
    assert disagreement(rows, float(sum(len(row.completion_ids) for row in rows))) > 1e-2


def test_supervised_loss_and_accuracy_by_hand() -> None:
    model, rows = tiny_llama(), ragged_rows()
    stats = learner(model, SupervisedObjective()).accumulate(rows, global_denominator(rows))
    nll, right = [], []
    for row in rows:
        logits = model(torch.tensor([row.prompt_ids + row.completion_ids])).logits[0].detach()
        for t, token in enumerate(row.completion_ids):
            if row.loss_mask is None or row.loss_mask[t]:
                at = logits[len(row.prompt_ids) - 1 + t]
                nll.append(float(torch.logsumexp(at, 0) - at[token]))
                right.append(int(at.argmax()) == token)
    assert stats["loss"] == pytest.approx(math.fsum(nll) / len(nll), abs=1e-9)
    assert stats["sft/token_accuracy"] == pytest.approx(sum(right) / len(right), abs=1e-12)
    assert set(stats) == {"loss", "sft/token_accuracy"}


def test_statistics_by_hand_at_the_first_update() -> None:
    model, rows = tiny_llama(), ragged_rows(loss_mask=None)
    own = learner(model).logprobs(rows)
    rows = [replace(row, rollout_logprobs=s, old_logprobs=s, ref_logprobs=s) for row, s in zip(rows, own, strict=True)]
    stats = learner(model).accumulate(rows, global_denominator(rows))
    tokens = sum(len(row.completion_ids) for row in rows)
    expected_loss = -sum(row.advantage * len(row.completion_ids) for row in rows) / tokens
    assert stats.pop("loss") == pytest.approx(expected_loss, abs=1e-9)
    assert 0 < stats.pop("policy/entropy") < math.log(23)
    assert stats.pop("policy/ratio_mean") == 1.0
    assert stats == dict.fromkeys(stats, 0.0)  # kl, clip shares, sampler gap
    assert set(stats) == {f"policy/{n}" for n in ("kl", "clip_share", "clip_low_share", "clip_high_share")} | {
        "sampler/logprob_gap_k3"
    }


def test_clip_shares_and_gaps_are_token_weighted_over_trained_tokens_only() -> None:
    # ratios 1.5 (three tokens, good), 0.5 (one token, bad), 1 (two trained tokens), 9 (masked)
    cases = [([2, 3, 4], 1.0, 1.5, None), ([5], -1.0, 0.5, None), ([6, 7, 8], 1.0, 1.0, [True, True, False])]
    rows = [TrainRow([9, 10], ids, adv, ref_logprobs=[0.0] * len(ids), loss_mask=mask) for ids, adv, _, mask in cases]
    model = tiny_llama()
    trainer = learner(model, max_micro_batch_rows=1)
    moved = []
    for row, own, (_, _, ratio, mask) in zip(rows, trainer.logprobs(rows), cases, strict=True):
        old = [value - math.log(ratio) for value in own]
        old[-1] -= math.log(9) if mask else 0.0
        moved.append(replace(row, rollout_logprobs=old))
    stats = trainer.accumulate(moved, global_denominator(moved))
    assert stats["policy/clip_high_share"] == pytest.approx(3 / 6)
    assert stats["policy/clip_low_share"] == pytest.approx(1 / 6)
    assert stats["policy/clip_share"] == pytest.approx(4 / 6)
    assert stats["policy/ratio_mean"] == pytest.approx((3 * 1.5 + 0.5 + 2) / 6)
    gap = 3 * (0.5 - math.log(1.5)) + (-0.5 - math.log(0.5))
    assert stats["sampler/logprob_gap_k3"] == pytest.approx(gap / 6)


def test_kl_is_measured_without_a_weight_and_absent_when_not_tracked() -> None:
    rows = near_policy_rows()
    tracked = learner(tiny_llama(), replace(POLICY, kl_weight=0.0)).accumulate(rows, 1.0)
    untracked = learner(tiny_llama(), replace(POLICY, kl_weight=0.0, track_kl=False)).accumulate(rows, 1.0)
    assert tracked.pop("policy/kl") > 0
    assert tracked == untracked


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("ref_logprobs", None, "row 0 has no ref_logprobs"),
        ("rollout_logprobs", None, "row 0 has no rollout_logprobs"),
        ("old_logprobs", [-1.0] * 30, "row 0: 30 values of old_logprobs for"),
        ("loss_mask", [True] * 30, "row 0: 30 values of loss_mask for"),
    ],
)
def test_rows_that_lack_something_are_refused(field: str, value: object, message: str) -> None:
    rows = [replace(row, **{field: value}) for row in ragged_rows()]
    with pytest.raises(ValueError, match=message):
        learner(tiny_llama()).accumulate(rows, 1.0)
