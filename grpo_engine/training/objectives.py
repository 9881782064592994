"""What the learner minimises: sums over the trained tokens of a micro-batch, and the sums beside them.

The policy objective, a token at a time (trained tokens only, w = the row's `Normalizer.token_weight`):

    w × [ c × L(policy, old, A) on the tokens of policy_mask        loss/policy     losses.LOSSES, c = correction.py
        + kl.weight × k(log reference - log full policy)            loss/kl         kl.py; place loss
        - entropy.bonus × entropy                                   loss/entropy
        - auxiliary.weight × log policy, on the rows it names ]     loss/auxiliary

`policy` is the distribution that was sampled from (renormalised over kept ids when sampling was truncated), `full` the
untruncated one at the same temperature. Ratios and the auxiliary term use `policy`, KL and entropy the full one.

Old log-probabilities: a row's own when it has them; else the present forward's values without gradient, so that the
ratio is exactly 1 and the gradient that of REINFORCE; with old_logprobs sampler the row's rollout log-probabilities.

policy_mask (top-entropy tokens, arXiv:2506.01939) selects tokens of the policy term alone: denominators, KL, entropy
and the sequence ratio of gspo still count every trained token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from grpo_engine.config import RLStage
from grpo_engine.config_training import (
    AuxiliaryConfig,
    ClipLoss,
    CorrectionConfig,
    EntropyConfig,
    KLConfig,
    LossConfig,
    ValueConfig,
)
from grpo_engine.model.logprobs import TokenLogprobs
from grpo_engine.training import correction, kl, losses
from grpo_engine.training.columns import Columns
from grpo_engine.training.losses import masked
from grpo_engine.types import TOKENS, Normalizer, TrainRow


@dataclass(frozen=True, slots=True)
class Sums:
    """Of one micro-batch. Add them up over micro-batches and ranks; only then divide, or take what is largest."""

    loss: Tensor
    """Scalar with gradient: sum of token weight x token loss. Divide by the step's `global_denominator`."""
    stats: dict[str, Tensor]
    """Scalars, float64, detached: plain sums over trained tokens. Divide by the number of trained tokens."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """Scalars, float64, detached: maxima over trained tokens."""
    parts: dict[str, Tensor] = field(default_factory=dict)
    """Scalars, float64, detached: what `loss` is the sum of (`loss/policy`, …). Divide by the step's denominator."""


class Objective(Protocol):
    @property
    def temperature(self) -> float: ...

    @property
    def normalizer(self) -> Normalizer: ...

    @property
    def entropy_gradient(self) -> bool:
        """Whether TokenLogprobs.entropy must carry a gradient."""
        ...

    @property
    def top_entropy_share(self) -> float:
        """Below 1: rows need a policy_mask of the step's tokens of highest entropy."""
        ...

    def __call__(self, logprobs: TokenLogprobs, rows: Sequence[TrainRow]) -> Sums:
        """`logprobs` holds the rows' completion tokens in order."""
        ...


@dataclass(frozen=True, slots=True)
class SupervisedObjective:
    """Cross entropy of the demonstration's tokens, in nats; a token mean after the division."""

    temperature: float = 1.0
    normalizer: Normalizer = TOKENS
    entropy_gradient: bool = False
    top_entropy_share: float = 1.0

    def __call__(self, logprobs: TokenLogprobs, rows: Sequence[TrainRow]) -> Sums:
        columns = Columns(rows, logprobs.full)
        mask = columns.flags("loss_mask")
        loss = masked(-logprobs.full, mask) * _token_weights(columns, rows, self.normalizer)
        return Sums(loss.sum(), _sums({"sft/token_accuracy": logprobs.correct}, mask))


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """GRPO, its variants and PPO's policy side: see the module's equation. Rows need rollout_logprobs, and ref_logprobs
    where KL is used or tracked."""

    temperature: float
    loss: LossConfig = field(default_factory=ClipLoss)
    kl: KLConfig = field(default_factory=KLConfig)
    entropy: EntropyConfig = field(default_factory=EntropyConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    auxiliary: AuxiliaryConfig = field(default_factory=AuxiliaryConfig)
    normalizer: Normalizer = TOKENS
    old_logprobs: Literal["trainer", "sampler"] = "trainer"

    @classmethod
    def from_stage(cls, stage: RLStage) -> PolicyObjective:
        return cls(
            temperature=stage.sampling.temperature,
            loss=stage.loss,
            kl=stage.kl,
            entropy=stage.entropy,
            correction=stage.correction,
            auxiliary=stage.auxiliary,
            normalizer=Normalizer(stage.loss.normalizer, stage.sampling.max_new_tokens),
            old_logprobs=stage.old_logprobs,
        )

    @property
    def entropy_gradient(self) -> bool:
        return self.entropy.bonus > 0

    @property
    def top_entropy_share(self) -> float:
        return self.entropy.top_share

    def __call__(self, logprobs: TokenLogprobs, rows: Sequence[TrainRow]) -> Sums:
        """Raises ValueError when a row lacks what the objective needs or its lists differ in length."""
        policy = logprobs.policy
        columns = Columns(rows, policy)
        mask = columns.flags("loss_mask")
        sampled = columns.numbers("rollout_logprobs")
        from_sampler = self.old_logprobs == "sampler"
        old = columns.numbers_or("old_logprobs", sampled if from_sampler else policy.detach())
        weights = correction.correction_weights(old - sampled, mask, columns.row_N, len(rows), self.correction)
        advantage = columns.numbers_or("token_advantages", columns.per_row([row.advantage for row in rows]))
        inputs = losses.LossInputs(policy, old, advantage, mask, columns.row_N, len(rows))
        terms = losses.LOSSES[self.loss.kind](inputs, self.loss)
        chosen = mask & columns.flags("policy_mask")
        parts = {"loss/policy": masked(terms.loss, chosen) * weights.weight.to(policy.dtype)}
        parts |= self._other_parts(logprobs, rows, columns, mask, masked(policy - old, mask))
        # Old values from the sampler have no gap to it: the present policy is measured then.
        gap = masked((policy.detach() if from_sampler else old) - sampled, mask).double()
        stats = _policy_stats(terms, chosen, gap) | {"policy/entropy": logprobs.entropy}
        if self.correction.kind != "none":
            stats |= {"sampler/weight_mean": weights.weight, "sampler/masked_share": weights.dropped}
        if self.kl.weight > 0 or self.kl.track:
            reference = columns.numbers("ref_logprobs")
            stats["policy/kl"] = kl.k3(masked((reference - logprobs.full).detach().double(), mask))
        token_weight = _token_weights(columns, rows, self.normalizer)
        weighted = {name: part * token_weight for name, part in parts.items()}
        loss = torch.stack(list(weighted.values())).sum()
        return Sums(loss, _sums(stats, mask), _maxima({"policy/ratio_max": terms.ratio}, mask), _sums(weighted, mask))

    def _other_parts(
        self, logprobs: TokenLogprobs, rows: Sequence[TrainRow], columns: Columns, mask: Tensor, change: Tensor
    ) -> dict[str, Tensor]:
        """[N] terms beside the policy's; those without a weight are left out: not even 0 x inf may pass."""
        parts = {}
        if self.kl.weight > 0 and self.kl.place == "loss":
            x = masked(columns.numbers("ref_logprobs") - logprobs.full, mask)
            parts["loss/kl"] = self.kl.weight * kl.kl_loss(x, change, self.kl.estimator, unbiased=self.kl.unbiased)
        if self.entropy.bonus > 0:
            parts["loss/entropy"] = -self.entropy.bonus * masked(logprobs.entropy, mask)
        if self.auxiliary.weight > 0:
            every = self.auxiliary.rows == "all"
            of_rows = columns.per_row([every or row.advantage > 0 for row in rows]).bool()
            parts["loss/auxiliary"] = -self.auxiliary.weight * masked(logprobs.policy, mask & of_rows)
        return parts


def value_sums(values: Tensor, rows: Sequence[TrainRow], value: ValueConfig, normalizer: Normalizer = TOKENS) -> Sums:
    """The critic's loss: loss_weight x clipped squared error of `values` [N] against the rows' returns, normalised as
    the policy's. `stats` hold the moments that `explained_variance` needs. Rows need returns, and old_values with a
    clip."""
    columns = Columns(rows, values)
    mask = columns.flags("loss_mask")
    returns = masked(columns.numbers("returns"), mask)
    values = masked(values, mask)
    old = values.detach() if value.clip is None else masked(columns.numbers("old_values"), mask)
    loss, clipped = losses.clipped_value_loss(values, old, returns, value.clip)
    error = (returns - values).detach().double()
    stats = {
        "value/loss": loss,
        "value/clip_share": clipped,
        "value/mean": values,
        "value/return_mean": returns,
        "value/return_square": returns.double().square(),
        "value/error_mean": error,
        "value/error_square": error.square(),
    }
    weighted = value.loss_weight * loss * _token_weights(columns, rows, normalizer)
    return Sums(weighted.sum(), _sums(stats, mask), parts=_sums({"loss/value": weighted}, mask))


def explained_variance(means: Mapping[str, float]) -> float | None:
    """1 - Var(return - value) / Var(return) from the token means of `value_sums`; None when returns do not vary.

    1: the critic knows every return. 0: no better than a constant. Below 0: worse than one."""
    variance = means["value/return_square"] - means["value/return_mean"] ** 2
    if variance <= 1e-12 * max(1.0, means["value/return_square"]):
        return None
    return 1 - (means["value/error_square"] - means["value/error_mean"] ** 2) / variance


def _token_weights(columns: Columns, rows: Sequence[TrainRow], normalizer: Normalizer) -> Tensor:
    return columns.per_row([normalizer.token_weight(row) for row in rows])


def _policy_stats(terms: losses.LossTerms, chosen: Tensor, gap: Tensor) -> dict[str, Tensor]:
    low, high = terms.clipped_low & chosen, terms.clipped_high & chosen
    return {
        "policy/ratio_mean": terms.ratio,
        "policy/clip_low_share": low,
        "policy/clip_high_share": high,
        "policy/clip_share": low | high,
        "sampler/logprob_gap_k3": kl.k3(gap),
    }


@torch.no_grad()
def _sums(values: Mapping[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    if not values:
        return {}
    stacked = torch.stack([value.detach().double() for value in values.values()])
    return dict(zip(values, masked(stacked, mask).sum(1).unbind(), strict=True))


@torch.no_grad()
def _maxima(values: Mapping[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """0 where no token is trained."""
    zero = torch.zeros(1, dtype=torch.float64, device=mask.device)
    return {name: torch.cat([masked(value.detach().double(), mask), zero]).max() for name, value in values.items()}
