"""Losses of one row as lists of floats. `frozen` stands for the policy's log-probabilities inside a stop-gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence

from grpo_engine.config_training import CISPOLoss, ClipLoss, CorrectionConfig, GSPOLoss

Floats = Sequence[float]


def row_losses(
    policy: Floats,
    frozen: Floats,
    old: Floats,
    advantages: Floats,
    mask: Sequence[bool],
    config: ClipLoss | GSPOLoss | CISPOLoss,
) -> list[float]:
    losses = []
    for t in range(len(policy)):
        if not mask[t]:
            losses.append(0.0)
        elif isinstance(config, ClipLoss):
            ratio = math.exp(policy[t] - old[t])
            losses.append(surrogate(ratio, advantages[t], config.clip_low, config.clip_high, config.dual_clip))
        elif isinstance(config, GSPOLoss):
            logs = [policy[s] - old[s] for s in range(len(policy)) if mask[s]]
            ratio = math.exp(sum(logs) / len(logs))
            losses.append(surrogate(ratio, advantages[t], config.clip_low, config.clip_high, None))
        else:
            weight = min(math.exp(frozen[t] - old[t]), 1 + config.clip_high)
            if config.clip_low is not None:
                weight = max(weight, 1 - config.clip_low)
            losses.append(-weight * advantages[t] * policy[t])
    return losses


def surrogate(ratio: float, advantage: float, low: float, high: float, dual: float | None) -> float:
    if advantage >= 0:
        return -min(ratio, 1 + high) * advantage
    ratio = max(ratio, 1 - low)
    return -(ratio if dual is None else min(ratio, dual)) * advantage


def kl(policy: float, reference: float, change: float, frozen_change: float, estimator: str, unbiased: bool) -> float:
    if estimator == "k1":
        estimate = policy - reference
    elif estimator == "k2":
        estimate = (policy - reference) ** 2 / 2
    else:
        estimate = math.exp(reference - policy) - (reference - policy) - 1
    if not unbiased:
        return estimate
    return estimate * math.exp(frozen_change if estimator == "k2" else change)


def correction(gaps: Floats, mask: Sequence[bool], config: CorrectionConfig) -> list[float]:
    """Weight of each token of one row."""
    trained = [gap for gap, on in zip(gaps, mask, strict=True) if on]
    weights = []
    for gap, on in zip(gaps, mask, strict=True):
        log_weight = gap if on else 0.0
        if config.level == "sequence":
            log_weight = sum(trained)
        if config.level == "geometric":
            log_weight = sum(trained) / max(1, len(trained))
        weight = math.exp(log_weight)
        inside = config.min_weight <= weight <= config.max_weight
        if config.kind == "none":
            weight = 1.0
        elif config.kind == "truncate":
            weight = max(config.min_weight, min(config.max_weight, weight))
        elif config.level == "geometric":
            weight = 1.0 if inside else 0.0
        else:
            weight = weight if inside else 0.0
        weights.append(weight)
    return weights


def value_loss(value: float, old: float, target: float, clip: float | None) -> float:
    plain = (value - target) ** 2 / 2
    if clip is None:
        return plain
    bounded = min(max(value, old - clip), old + clip)
    return max(plain, (bounded - target) ** 2 / 2)
