"""Estimates of KL(policy || reference) from sampled tokens. All tensors [N]; x = log reference - log policy, in nats.

    k1 = -x            unbiased, may be negative
    k2 = x² / 2        biased, never negative
    k3 = exp(x) - x - 1   unbiased, never negative                Schulman, http://joschu.net/blog/kl-approx.html

Values and gradients are different questions. For tokens drawn from the policy itself, with s = gradient of log policy,
the gradient of the KL is E[-x s] (arXiv:2510.01555). Differentiating the estimate at a fixed sample gives:

    k1  E[s] = 0                        no gradient at all: k1 in the loss does nothing
    k2  E[-x s]                         exactly the KL's gradient
    k3  E[(1 - exp(x)) s]               that of KL(reference || policy), equal to first order only

`unbiased` weighs a token by the importance ratio w = exp(policy - old), which makes the gradient exact for tokens drawn
from `old` too (DeepSeek-V3.2, arXiv:2512.02556). For k1 and k3 w keeps its gradient: the missing score-function
term k s arises from it, also where old is the policy's own detached value and w = 1. For k2 w is detached, since k2
needs no score-function term and would get a wrong one.

Not clamped: clamping removes the gradient exactly where KL explodes and hides it from the guards. The gradient counts
each token's own distribution, not how a token changes the KL of later ones; KL in the reward counts that too.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def k1(x: Tensor) -> Tensor:
    return -x


def k2(x: Tensor) -> Tensor:
    return x.square() / 2


def k3(x: Tensor) -> Tensor:
    """Written with expm1, which keeps its digits where the two distributions nearly agree."""
    return torch.expm1(x) - x


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def kl_estimate(log_ratio: Tensor, estimator: str) -> Tensor:
    """[N] nats a token; `log_ratio` x = log reference - log policy of the sampled tokens, masked ones replaced."""
    return ESTIMATORS[estimator](log_ratio)


def kl_loss(log_ratio: Tensor, policy_change: Tensor, estimator: str, *, unbiased: bool) -> Tensor:
    """[N] the KL term of the loss. `policy_change` = policy - old log-probabilities, with gradient, masked tokens
    replaced; used only by `unbiased`. With truncated sampling it is the change of the truncated distribution, and the
    weighted gradient is exact only where the kept sets hold all the mass."""
    estimate = kl_estimate(log_ratio, estimator)
    if not unbiased:
        return estimate
    weight = policy_change.exp()
    return estimate * (weight.detach() if estimator == "k2" else weight)


def token_kl(policy: float, reference: float, estimator: str) -> float:
    """One token's estimate in float64, from log-probabilities in nats: KL in the reward.

    Example: token_kl(-1.0, -1.5, "k1") == 0.5"""
    x = reference - policy
    if estimator == "k1":
        return -x
    if estimator == "k2":
        return x * x / 2
    return math.expm1(x) - x if x < 700 else math.inf
