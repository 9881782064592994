"""PPO's advantages: generalised advantage estimation, a token at a time (arXiv:1506.02438 eq. 16).

Pure Python, float64.

With V_t the value before token t and V after the last token 0 (a completion ends the episode, also one that ran out of
tokens):

    delta_t = r_t + gamma V_{t+1} - V_t
    A_t     = delta_t + gamma lambda A_{t+1}
    R_t     = A_t + V_t                                the critic's target, taken before whitening

Tokens that were not sampled by the policy (mask False, such as a tool's answer) are no decisions: V and A are carried
over them, so V_{t+1} and A_{t+1} above mean the next *trained* token, and no discount passes there. A reward that falls
on them belongs to the trained token before. They get advantage and return 0. OpenRLHF multiplies by the mask instead,
which bootstraps from a value of 0 in the middle of a completion.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from grpo_engine.training.advantages import RELATIVE_STD_FLOOR


def gae(
    token_rewards: Sequence[float], values: Sequence[float], mask: Sequence[bool], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """(advantages, returns), each [T], of one completion.

    Example: gae([0, 1], [0.5, 0.5], [True, True], 1.0, 1.0) == ([0.5, 0.5], [1.0, 1.0])

    Raises ValueError when the lists differ in length."""
    if not len(token_rewards) == len(values) == len(mask):
        raise ValueError(f"{len(token_rewards)} rewards, {len(values)} values and {len(mask)} mask entries must match")
    advantages, returns = [0.0] * len(values), [0.0] * len(values)
    next_value = next_advantage = skipped_reward = 0.0
    for t in range(len(values) - 1, -1, -1):
        if not mask[t]:
            skipped_reward += token_rewards[t]
            continue
        delta = token_rewards[t] + skipped_reward + gamma * next_value - values[t]
        advantages[t] = delta + gamma * lam * next_advantage
        returns[t] = advantages[t] + values[t]
        next_value, next_advantage, skipped_reward = values[t], advantages[t], 0.0
    return advantages, returns


def whiten(advantages: Sequence[Sequence[float]], masks: Sequence[Sequence[bool]]) -> list[list[float]]:
    """Advantages of all completions scaled to mean 0 and unbiased (n - 1) variance 1 over the n tokens of all masks.

    No epsilon is added. Without variance (std < 1e-6 * max(1, |mean|), or fewer than two tokens) all become 0, by the
    same rule as in a group. Masked tokens get 0. Raises ValueError when lengths differ."""
    flat = [a for row, mask in zip(advantages, masks, strict=True) for a, on in zip(row, mask, strict=True) if on]
    mean = math.fsum(flat) / max(1, len(flat))
    std = math.sqrt(math.fsum((a - mean) ** 2 for a in flat) / max(1, len(flat) - 1))
    if len(flat) < 2 or std < RELATIVE_STD_FLOOR * max(1.0, abs(mean)):
        return [[0.0] * len(row) for row in advantages]
    return [
        [(a - mean) / std if on else 0.0 for a, on in zip(row, mask, strict=True)]
        for row, mask in zip(advantages, masks, strict=True)
    ]


def gae_bound(num_tokens: int, gamma: float, lam: float, *, max_reward: float, max_value: float) -> float:
    """Largest |A| of a completion with `num_tokens` trained tokens, token rewards within ±max_reward, values within
    ±max_value, before whitening. Exact: written out, A_0 = -V_0 + sum over k >= 1 of gamma^k lam^(k-1) (1 - lam) V_k
    + sum over k >= 0 of (gamma lam)^k r_k, and signs that agree reach the sum of the coefficients' sizes."""
    if num_tokens < 1:
        return 0.0
    decay = [(gamma * lam) ** k for k in range(num_tokens)]
    value_share = 1 + gamma * (1 - lam) * math.fsum(decay[:-1])
    return max_value * value_share + max_reward * math.fsum(decay)


def whitened_bound(num_tokens: int) -> float:
    """Largest |A| after whitening over `num_tokens` tokens: (n - 1) / sqrt(n), as grpo's within a group, and reached
    the same way, by one outlier among equals."""
    return (num_tokens - 1) / math.sqrt(num_tokens) if num_tokens >= 2 else 0.0
