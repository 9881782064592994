"""Group-relative advantages (GRPO: DeepSeekMath, arXiv:2402.03300; without the division: Dr.GRPO, arXiv:2503.20783).

Pure Python in float64. One call is one group: groups are joined by id before, never by position, so groups of unequal
size cannot be mixed.

Rules, stated because engines differ in them without saying so:
- the mean and the *sample* standard deviation (n - 1) are taken over the completions that were scored;
- a completion that abstained (None) gets advantage 0 and counts in neither mean nor deviation;
- a group has no variance when it has fewer than two scores or when std < 1e-6 * max(1, |mean|): all advantages are 0,
  so float residue of equal rewards is never blown up;
- no epsilon is added, so (reward - mean) / std is exact and can be shown as arithmetic.

Consequence: |A| <= (n - 1) / sqrt(n). Proof: let d = r_i - mean. The other n - 1 deviations sum to -d, so by
Cauchy-Schwarz their squares sum to at least d^2 / (n - 1); hence (n - 1) std^2 >= d^2 n / (n - 1). Equality holds when
the other n - 1 rewards are equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from grpo_engine.errors import RewardError

RELATIVE_STD_FLOOR = 1e-6
"""A smaller standard deviation, relative to max(1, |mean|), counts as no variance."""


def group_advantages(rewards: Sequence[float | None], *, normalize_std: bool) -> list[float]:
    """Advantage of each completion of one group, in order.

    Example: group_advantages([1, 0, None], normalize_std=False) == [0.5, -0.5, 0.0]

    Raises RewardError for a NaN or infinite reward: it would poison the whole group."""
    spread = _mean_and_std(rewards)
    if spread is None:
        return [0.0] * len(rewards)
    mean, std = spread
    scale = std if normalize_std else 1.0
    return [0.0 if reward is None else (reward - mean) / scale for reward in rewards]


def _mean_and_std(rewards: Sequence[float | None]) -> tuple[float, float] | None:
    """Mean and sample standard deviation of the scored completions; None when the group has no variance."""
    scored = [float(reward) for reward in rewards if reward is not None]
    for reward in scored:
        if not math.isfinite(reward):
            raise RewardError(f"reward {reward} in a group of {len(rewards)}: must be finite; return None to abstain")
    if len(scored) < 2:
        return None
    mean = math.fsum(scored) / len(scored)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in scored) / (len(scored) - 1))
    if std < RELATIVE_STD_FLOOR * max(1.0, abs(mean)):
        return None
    return mean, std
