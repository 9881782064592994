from __future__ import annotations

import math
from collections.abc import Sequence


def group_advantages(rewards: Sequence[float | None], kind: str) -> list[float]:
    scored = [reward for reward in rewards if reward is not None]
    n = len(scored)
    mean = sum(scored) / n if n else 0.0
    squares = 0.0
    for reward in scored:
        squares += (reward - mean) ** 2
    if n < 2 or math.sqrt(squares / (n - 1)) < 1e-6 * max(1.0, abs(mean)):
        return [0.0 for _ in rewards]
    advantages = []
    for index, reward in enumerate(rewards):
        if reward is None:
            advantages.append(0.0)
            continue
        others = [r for place, r in enumerate(rewards) if place != index and r is not None]
        if kind == "grpo":
            advantages.append((reward - mean) / math.sqrt(squares / (n - 1)))
        elif kind == "seed_paper":
            advantages.append((reward - mean) / (math.sqrt(squares / n) + 1e-8))
        elif kind == "dr_grpo":
            advantages.append(reward - mean)
        elif kind == "rloo":
            advantages.append(reward - sum(others) / len(others))
        elif kind == "rank":
            advantages.append(sum((reward > r) - (reward < r) for r in others) / len(others))
    return advantages


def gae(
    rewards: Sequence[float], values: Sequence[float], mask: Sequence[bool], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """By the sum of all later temporal differences, over the trained tokens alone."""
    trained = [t for t, on in enumerate(mask) if on]
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    deltas = []
    for place, t in enumerate(trained):
        last = place + 1 == len(trained)
        until = len(mask) if last else trained[place + 1]
        following = 0.0 if last else values[trained[place + 1]]
        deltas.append(sum(rewards[t:until]) + gamma * following - values[t])
    for place, t in enumerate(trained):
        for later in range(place, len(trained)):
            advantages[t] += (gamma * lam) ** (later - place) * deltas[later]
        returns[t] = advantages[t] + values[t]
    return advantages, returns


def whiten(advantages: Sequence[Sequence[float]], masks: Sequence[Sequence[bool]]) -> list[list[float]]:
    pairs = [(a, on) for row, mask in zip(advantages, masks, strict=True) for a, on in zip(row, mask, strict=True)]
    trained = [a for a, on in pairs if on]
    mean = sum(trained) / len(trained)
    variance = sum((a - mean) ** 2 for a in trained) / (len(trained) - 1)
    return [
        [(a - mean) / math.sqrt(variance) * on for a, on in zip(row, mask, strict=True)]
        for row, mask in zip(advantages, masks, strict=True)
    ]
