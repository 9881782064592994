"""How a group's advantages follow from its rewards, computed here from what the rollout file holds.

Written apart from the engine on purpose: where both disagree, the page shows it. docs/training.md derives the forms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RELATIVE_STD_FLOOR = 1e-6
"""A smaller sample standard deviation, relative to max(1, |mean|), counts as no variance."""
RELATIVE_TIE = 1e-9
"""Rewards this near, relative to max(1, largest |reward|), share a rank."""
SEED_EPSILON = 1e-8


@dataclass(frozen=True, slots=True)
class AdvantageForm:
    """What the engine wrote about the batch's advantages."""

    kind: str
    """grpo, seed_paper, dr_grpo, rloo, rank or gae."""
    gae_lambda: float | None = None
    gamma: float | None = None
    whiten: bool = False
    smooth_rewards: bool = False
    kl_in_reward: float = 0.0
    """Weight of the KL that was subtracted from rewards; 0 when it was not."""
    kl_estimator: str = "k3"


@dataclass(frozen=True, slots=True)
class GroupNumbers:
    """What the arithmetic of one group's completions shares."""

    mean: float | None
    """Of the rewards that advantages were computed from, abstained ones left out."""
    std: float | None
    """Sample standard deviation of them; null below two."""
    scale: float | None
    """What a difference from the mean is divided by; null where the form divides by nothing."""
    num_scored: int
    has_variance: bool


@dataclass(frozen=True, slots=True)
class Whitening:
    """PPO: mean and standard deviation over all trained tokens of the batch, before they became 0 and 1."""

    mean: float
    std: float


def form_of(facts: Mapping[str, Any]) -> AdvantageForm:
    """From a rollout file's metadata; files of the first version say only whether they divide by the deviation."""
    about = facts.get("advantage", {})
    kl = about.get("kl") or {}
    kind = str(about.get("kind") or about.get("form") or "grpo")
    if about.get("normalize_std") is False:
        kind = "dr_grpo"
    return AdvantageForm(
        kind=kind,
        gae_lambda=about.get("gae_lambda"),
        gamma=about.get("gamma"),
        whiten=bool(about.get("whiten")),
        smooth_rewards=bool(about.get("smooth_rewards")),
        kl_in_reward=float(kl.get("weight", 0)) if kl.get("place") == "reward" else 0.0,
        kl_estimator=str(kl.get("estimator", "k3")),
    )


def group_numbers(rewards: Sequence[float | None], form: AdvantageForm) -> GroupNumbers:
    scored = _scored(rewards)
    mean, std = mean_and_std(rewards)
    varied = mean is not None and std is not None and std >= RELATIVE_STD_FLOOR * max(1.0, abs(mean))
    scale = None
    if form.kind == "grpo":
        scale = std
    elif form.kind == "seed_paper" and std is not None:
        scale = std * math.sqrt((len(scored) - 1) / len(scored)) + SEED_EPSILON
    return GroupNumbers(mean, std, scale, len(scored), varied)


def mean_and_std(rewards: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean and sample standard deviation of the finite rewards; std needs two."""
    known = _scored(rewards)
    if not known:
        return None, None
    mean = math.fsum(known) / len(known)
    if len(known) < 2:
        return mean, None
    return mean, math.sqrt(math.fsum((reward - mean) ** 2 for reward in known) / (len(known) - 1))


def baseline(reward: float | None, numbers: GroupNumbers, form: AdvantageForm) -> float | None:
    """What is subtracted from a completion's reward: the group's mean, in rloo the mean of the others."""
    if form.kind in ("rank", "gae") or reward is None or numbers.mean is None:
        return None
    if form.kind != "rloo":
        return numbers.mean
    others = numbers.num_scored - 1
    return (numbers.mean * numbers.num_scored - reward) / others if others else None


def mean_rank(reward: float | None, rewards: Sequence[float | None], form: AdvantageForm) -> float | None:
    """1 = lowest; equals share the mean of their ranks. Only in rank."""
    if form.kind != "rank" or reward is None:
        return None
    scored = _scored(rewards)
    tie = RELATIVE_TIE * max(1.0, *map(abs, scored))
    below = sum(other < reward - tie for other in scored)
    equal = sum(abs(other - reward) <= tie for other in scored)
    return below + (equal + 1) / 2


def expected_advantage(
    reward: float | None, numbers: GroupNumbers, form: AdvantageForm, subtracted: float | None, rank: float | None
) -> float | None:
    """Of a group-relative form; 0 without variance or reward, null where no completion has a reward."""
    if numbers.mean is None:
        return None
    if reward is None or not numbers.has_variance:
        return 0.0
    if rank is not None:
        return (2 * rank - numbers.num_scored - 1) / (numbers.num_scored - 1)
    difference = reward - (0.0 if subtracted is None else subtracted)
    return difference if numbers.scale is None else difference / numbers.scale


# ---------------------------------------------------------------- PPO
def whitening(rows: Sequence[Mapping[str, Any]], form: AdvantageForm) -> Whitening | None:
    """The line that leads from return - value to the recorded advantage, through the tokens of one group.

    Null when the form does not whiten, or the group cannot tell (older file, no judged completion, equal tokens)."""
    if form.kind != "gae" or not form.whiten:
        return None
    pairs = [pair for row in rows if _is_trained(row) for pair in _token_pairs(row)]
    if len(pairs) < 2:
        return None
    raw, white = zip(*pairs, strict=True)
    raw_std, white_std = mean_and_std(raw)[1] or 0.0, mean_and_std(white)[1] or 0.0
    if raw_std == 0 or white_std == 0:
        return None
    std = raw_std / white_std
    return Whitening(math.fsum(raw) / len(raw) - std * math.fsum(white) / len(white), std)


def expected_gae(row: Mapping[str, Any], found: Whitening | None, form: AdvantageForm) -> float | None:
    """Mean over tokens of return - value, whitened where the form does; 0 for a completion that was not judged."""
    pairs = _token_pairs(row)
    if not pairs:
        return 0.0 if row["reward"] is None else None
    mean = math.fsum(raw for raw, _ in pairs) / len(pairs)
    if not form.whiten:
        return mean
    if not _is_trained(row):
        return 0.0
    return None if found is None else (mean - found.mean) / found.std


def _is_trained(row: Mapping[str, Any]) -> bool:
    """False for a completion that was cut or not judged: whitening gives all its tokens exactly 0."""
    return any(row.get("token_advantages") or ())


def _token_pairs(row: Mapping[str, Any]) -> list[tuple[float, float]]:
    """(return - value, advantage) of every token."""
    columns = [row.get(name) or [] for name in ("returns", "values", "token_advantages")]
    return [(target - value, advantage) for target, value, advantage in zip(*columns, strict=False)]


def _scored(rewards: Sequence[float | None]) -> list[float]:
    return [reward for reward in rewards if reward is not None and math.isfinite(reward)]
