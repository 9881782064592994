"""What another reward would have changed: figures over groups whose completions were scored twice. Pure functions.

An advantage is, here, a reward's distance from its group's mean in sample standard deviations (the grpo form); its sign
is that of every form of advantage but rank and gae. A group has no variance, and its advantages are 0, when fewer than
two of its completions have a reward or their deviation is below 1e-6 x max(1, |mean|).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Any

from grpo_engine.types import RewardPart

RELATIVE_STD_FLOOR = 1e-6
MAX_EXAMPLES = 20
MAX_TEXT = 2000
"""Characters of an example's prompt and completion; of a longer one the end is kept."""


@dataclass(frozen=True, slots=True)
class Rescored:
    """One completion with its reward as it was and as another config gives it."""

    batch: int
    group_index: int
    completion_index: int
    group_id: str
    prompt_id: str
    prompt_text: str
    gold: str | None
    text: str
    old_reward: float | None
    new_reward: float | None
    old_used: float | None
    """What the old advantage was computed from: the reward, or where parts were normalised the shaped reward."""
    new_used: float | None
    old_parts: list[RewardPart]
    new_parts: list[RewardPart]


@dataclass
class PartFigures:
    """One part over all completions, before and after."""

    old_values: list[float] = field(default_factory=list)
    new_values: list[float] = field(default_factory=list)
    old_abstained: int = 0
    new_abstained: int = 0
    old_versions: set[str] = field(default_factory=set)
    new_versions: set[str] = field(default_factory=set)

    def told(self) -> dict[str, Any]:
        return {
            "old_mean": _mean(self.old_values),
            "new_mean": _mean(self.new_values),
            "old_abstained": self.old_abstained,
            "new_abstained": self.new_abstained,
            "old_versions": sorted(self.old_versions),
            "new_versions": sorted(self.new_versions),
        }


@dataclass
class Changes:
    """Sums over the groups seen so far; `summary` says what they come to."""

    num_groups: int = 0
    num_completions: int = 0
    correlations: list[float] = field(default_factory=list)
    num_sign_changed: int = 0
    num_became_zero: int = 0
    num_became_nonzero: int = 0
    num_best_changed: int = 0
    old_flat: int = 0
    new_flat: int = 0
    old_rewards: list[float] = field(default_factory=list)
    new_rewards: list[float] = field(default_factory=list)
    parts: dict[str, PartFigures] = field(default_factory=dict)
    examples: list[dict[str, Any]] = field(default_factory=list)

    def add(self, group: Sequence[Rescored]) -> None:
        """The completions of one group."""
        old, new = [row.old_used for row in group], [row.new_used for row in group]
        before, after = advantages(old), advantages(new)
        self.num_groups += 1
        self.num_completions += len(group)
        self.old_flat += not any(before)
        self.new_flat += not any(after)
        self.num_sign_changed += sum(a * b < 0 for a, b in zip(before, after, strict=True))
        self.num_became_zero += sum(a != 0 and b == 0 for a, b in zip(before, after, strict=True))
        self.num_became_nonzero += sum(a == 0 and b != 0 for a, b in zip(before, after, strict=True))
        self.num_best_changed += best(old).isdisjoint(best(new))
        correlation = rank_correlation(old, new)
        self.correlations += [] if correlation is None else [correlation]
        self._note_parts(group)
        found = [_example(*row) for row in zip(group, before, after, strict=True) if abs(row[1] - row[2]) > 1e-9]
        self.examples = nlargest(MAX_EXAMPLES, [*self.examples, *found], key=lambda one: one["change"])

    def _note_parts(self, group: Sequence[Rescored]) -> None:
        for row in group:
            self.old_rewards += [] if row.old_reward is None else [row.old_reward]
            self.new_rewards += [] if row.new_reward is None else [row.new_reward]
            for part in row.old_parts:
                figures = self.parts.setdefault(part.name, PartFigures())
                figures.old_versions.add(part.version)
                figures.old_abstained += part.value is None
                figures.old_values += [] if part.value is None else [part.value]
            for part in row.new_parts:
                figures = self.parts.setdefault(part.name, PartFigures())
                figures.new_versions.add(part.version)
                figures.new_abstained += part.value is None
                figures.new_values += [] if part.value is None else [part.value]

    def summary(self) -> dict[str, Any]:
        """JSON. Shares are of all groups or all completions; `rank_correlation` is the mean over the groups that have
        variance before and after (`num_correlated`), null when none has."""
        groups, completions = max(1, self.num_groups), max(1, self.num_completions)
        return {
            "num_groups": self.num_groups,
            "num_completions": self.num_completions,
            "rank_correlation": _mean(self.correlations),
            "num_correlated": len(self.correlations),
            "sign_changed_share": self.num_sign_changed / completions,
            "became_zero_share": self.num_became_zero / completions,
            "became_nonzero_share": self.num_became_nonzero / completions,
            "best_changed_share": self.num_best_changed / groups,
            "old_flat_share": self.old_flat / groups,
            "new_flat_share": self.new_flat / groups,
            "old_mean_reward": _mean(self.old_rewards),
            "new_mean_reward": _mean(self.new_rewards),
            "parts": {name: figures.told() for name, figures in self.parts.items()},
            "examples": self.examples,
        }


# ---------------------------------------------------------------- arithmetic
def advantages(rewards: Sequence[float | None]) -> list[float]:
    """Distance from the mean in sample deviations; 0 for None and in a group without variance.

    Example: advantages([1.0, 0.0, None]) == [0.7071…, -0.7071…, 0.0]"""
    known = [reward for reward in rewards if reward is not None]
    if len(known) < 2:
        return [0.0] * len(rewards)
    mean = math.fsum(known) / len(known)
    deviation = math.sqrt(math.fsum((reward - mean) ** 2 for reward in known) / (len(known) - 1))
    if deviation < RELATIVE_STD_FLOOR * max(1.0, abs(mean)):
        return [0.0] * len(rewards)
    return [0.0 if reward is None else (reward - mean) / deviation for reward in rewards]


def best(rewards: Sequence[float | None]) -> set[int]:
    """Indices of the highest reward; all of them where nobody was judged."""
    highest = max((reward for reward in rewards if reward is not None), default=None)
    return {index for index, reward in enumerate(rewards) if reward == highest}


def rank_correlation(old: Sequence[float | None], new: Sequence[float | None]) -> float | None:
    """Spearman's rho with mean ranks of equals, over the completions judged both times; None without variance.

    Example: rank_correlation([1, 2, 3], [10, 20, 15]) == 0.5"""
    pairs = [(a, b) for a, b in zip(old, new, strict=True) if a is not None and b is not None]
    left, right = mean_ranks([a for a, _ in pairs]), mean_ranks([b for _, b in pairs])
    middle = (len(pairs) - 1) / 2
    squares = math.fsum((a - middle) ** 2 for a in left) * math.fsum((b - middle) ** 2 for b in right)
    if squares == 0:
        return None
    return math.fsum((a - middle) * (b - middle) for a, b in zip(left, right, strict=True)) / math.sqrt(squares)


def mean_ranks(values: Sequence[float]) -> list[float]:
    """0-based; equals share the mean of their places. Example: mean_ranks([5, 7, 5]) == [0.5, 2.0, 0.5]"""
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(values)):
        places.setdefault(value, []).append(place)
    return [(places[value][0] + places[value][-1]) / 2 for value in values]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


# ---------------------------------------------------------------- examples
def _example(row: Rescored, before: float, after: float) -> dict[str, Any]:
    return {
        "batch": row.batch,
        "group": row.group_index,
        "completion": row.completion_index,
        "prompt_id": row.prompt_id,
        "prompt": row.prompt_text[-MAX_TEXT:],
        "gold": row.gold,
        "text": row.text[-MAX_TEXT:],
        "old_reward": row.old_reward,
        "new_reward": row.new_reward,
        "old_advantage": before,
        "new_advantage": after,
        "change": abs(after - before),
        "old_parts": _told(row.old_parts),
        "new_parts": _told(row.new_parts),
    }


def _told(parts: Iterable[RewardPart]) -> list[dict[str, Any]]:
    return [
        {
            "name": part.name,
            "value": part.value,
            "counted": part.counted,
            "weight": part.weight,
            "explanation": part.explanation[:MAX_TEXT],
            "version": part.version,
        }
        for part in parts
    ]
