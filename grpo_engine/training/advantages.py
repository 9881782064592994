"""Group-relative advantages: five forms, one rule for what has no variance, and the exact bound of each.

Pure Python in float64. One call is one group: groups are joined by id before, never by position, so groups of unequal
size cannot be mixed. With n scored completions r_1 … r_n of mean m (abstained ones are not among them):

    grpo        (r - m) / s              s = sqrt(sum (r - m)² / (n - 1))      DeepSeekMath, arXiv:2402.03300
    seed_paper  (r - m) / (σ + 1e-8)     σ = sqrt(sum (r - m)² / n); then centred again
    dr_grpo     r - m                                                          Dr.GRPO, arXiv:2503.20783
    rloo        r - mean of the others = (r - m) n / (n - 1)                   arXiv:2402.14740
    rank        (2 rank - n - 1) / (n - 1), rank 1 = lowest; rewards within 1e-9 max(1, max |r|) of each other are equal
                and share the mean of their ranks

Rules, stated because engines differ in them without saying so:
- a completion that abstained (None) gets advantage 0 and counts in neither mean, deviation, rank nor n; a group in
  which all abstained gets zeros. None is the only way to abstain: NaN and infinity raise RewardError, since as a silent
  abstention they would hide a broken reward function;
- a group has no variance when it has fewer than two scores or when s < 1e-6 * max(1, |m|): all its advantages are 0 in
  every form, so float residue of equal rewards is never blown up (NeMo-RL issue 1518) nor ranked. `has_variance` is the
  same rule for whoever drops or counts such groups;
- grpo adds no epsilon, so (reward - mean) / std is exact and can be shown as arithmetic. TRL adds 1e-4, verl 1e-6.

Bounds (`bound`), with R = highest - lowest reward. Let d = r_i - m; the other deviations sum to -d, so by Cauchy and
Schwarz their squares sum to at least d² / (n - 1), with equality when the other n - 1 rewards are equal. Hence
sum (r - m)² >= d² n / (n - 1), and |d| <= R (n - 1) / n:

    grpo        (n - 1) / sqrt(n)
    seed_paper  (n - 1) R / (sqrt(n - 1) R + 1e-8 n), below sqrt(n - 1) whatever R
    dr_grpo     R (n - 1) / n
    rloo        R
    rank        1

All are reached by one outlier among equals, and grow with n, so a group with abstentions keeps the bound of a full one.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

from grpo_engine.config_training import AdvantageConfig
from grpo_engine.errors import RewardError

RELATIVE_STD_FLOOR = 1e-6
"""A smaller sample standard deviation, relative to max(1, |mean|), counts as no variance."""
RELATIVE_TIE = 1e-9
"""Rewards this near to each other, relative to max(1, largest |reward|), share a rank: float residue is no
difference."""
SEED_EPSILON = 1e-8
"""Added to the population standard deviation by the seed papers' form."""
MAX_REWARD = 1e100
"""Larger magnitudes are refused: their squares leave the float range."""


def group_advantages(rewards: Sequence[float | None], form: AdvantageConfig) -> list[float]:
    """Advantage of each completion of one group, in order.

    Example: group_advantages([1, 0, None], DrGRPOAdvantage()) == [0.5, -0.5, 0.0]

    Raises RewardError for a NaN, infinite or larger than 1e100 reward (it would poison the whole group), and ValueError
    for `gae`, which works on tokens (training/gae.py)."""
    if form.kind not in FORMS:
        raise ValueError(f"advantage {form.kind} is not group-relative; one of {', '.join(FORMS)} is")
    scored = scored_rewards(rewards)
    if not has_variance(scored):
        return [0.0] * len(rewards)
    advantages = iter(FORMS[form.kind](scored))
    return [0.0 if reward is None else next(advantages) for reward in rewards]


def bound(kind: str, group_size: int, reward_range: float = math.inf) -> float:
    """Largest |advantage| that `kind` can give in a group of `group_size` rewards within `reward_range` of each other.

    Exact in real arithmetic and reached by one outlier among equals, unless the range is so small that it counts as no
    variance. Infinite for dr_grpo and rloo without a finite range. A group of fewer than two has advantage 0."""
    if kind not in BOUNDS:
        raise ValueError(f"advantage {kind} is not group-relative; one of {', '.join(BOUNDS)} is")
    if not reward_range >= 0:
        raise ValueError(f"reward_range {reward_range} must not be negative")
    return BOUNDS[kind](group_size, reward_range) if group_size >= 2 and reward_range > 0 else 0.0


def scored_rewards(rewards: Sequence[float | None]) -> list[float]:
    """The rewards that did not abstain. Raises RewardError for one that is NaN, infinite or larger than 1e100."""
    scored = [float(reward) for reward in rewards if reward is not None]
    for reward in scored:
        if not abs(reward) <= MAX_REWARD:
            raise RewardError(
                f"reward {reward} in a group of {len(rewards)}: must be finite and at most {MAX_REWARD:g} in size; "
                "return None to abstain"
            )
    return scored


def has_variance(scored: Sequence[float]) -> bool:
    """Whether a group's scored rewards differ by more than float residue; the rule of every form."""
    if len(scored) < 2:
        return False
    mean = math.fsum(scored) / len(scored)
    return _std(scored, ddof=1) >= RELATIVE_STD_FLOOR * max(1.0, abs(mean))


# ---------------------------------------------------------------- forms: [n] scored rewards with variance -> [n]
def grpo(rewards: Sequence[float]) -> list[float]:
    std = _std(rewards, ddof=1)
    return [deviation / std for deviation in _deviations(rewards)]


def seed_paper(rewards: Sequence[float]) -> list[float]:
    scale = _std(rewards, ddof=0) + SEED_EPSILON
    # The second centring only removes rounding: in exact arithmetic the mean is 0 already.
    return _deviations([deviation / scale for deviation in _deviations(rewards)])


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    return _deviations(rewards)


def rloo(rewards: Sequence[float]) -> list[float]:
    scale = len(rewards) / (len(rewards) - 1)
    return [deviation * scale for deviation in _deviations(rewards)]


def rank(rewards: Sequence[float]) -> list[float]:
    n, ordered = len(rewards), sorted(rewards)
    tie = RELATIVE_TIE * max(1.0, *map(abs, rewards))

    def scaled_rank(reward: float) -> float:
        below, up_to = bisect_left(ordered, reward - tie), bisect_right(ordered, reward + tie)
        # The equals hold the ranks below + 1 … up_to, so twice their mean rank is below + up_to + 1.
        return (below + up_to - n) / (n - 1)

    return [scaled_rank(reward) for reward in rewards]


def _deviations(values: Sequence[float]) -> list[float]:
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]


def _std(values: Sequence[float], *, ddof: int) -> float:
    return math.sqrt(math.fsum(d * d for d in _deviations(values)) / (len(values) - ddof))


FORMS: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "grpo": grpo,
    "seed_paper": seed_paper,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "rank": rank,
}
"""Adding a form: one function here, its bound below, one config class in config_training.py."""


# ---------------------------------------------------------------- bounds: (n, reward range) -> largest |advantage|
def _seed_bound(n: int, reward_range: float) -> float:
    # Divided by R, so that an infinite range gives the limit sqrt(n - 1).
    return (n - 1) / (math.sqrt(n - 1) + SEED_EPSILON * n / reward_range)


BOUNDS: dict[str, Callable[[int, float], float]] = {
    "grpo": lambda n, _: (n - 1) / math.sqrt(n),
    "seed_paper": _seed_bound,
    "dr_grpo": lambda n, reward_range: reward_range * (n - 1) / n,
    "rloo": lambda _, reward_range: reward_range,
    "rank": lambda *_: 1.0,
}
