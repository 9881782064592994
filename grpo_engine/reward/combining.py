"""From the parts of a batch to its rewards: clip, gates, weights, per-part normalisation. Pure functions.

For one completion, over the parts that did not abstain:

    counted = clip(value), or 0 where the gating part counts below gate_min (a gate may itself be gated)
    reward  = reward_clip(sum of weight x counted)

A part that abstained is left out of the sum; as a gate it lets everything through. With `normalize` the advantage is
computed from another sum, `shaped_reward`, in which the part's counted value is replaced by

    (counted - mean) / deviation        over the judged completions of its group, or of the whole batch

with the population's deviation; 0 where the deviation is below 1e-6 x max(1, |mean|), so that float residue of equal
values is not blown up. `reward` keeps the values themselves: a mean of normalised values is 0 whatever is learned.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from grpo_engine.types import Group, RewardPart, Rollout

RELATIVE_STD_FLOOR = 1e-6
"""A smaller deviation, relative to max(1, |mean|), counts as none."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How one part's value enters the reward."""

    name: str
    weight: float = 1.0
    clip: tuple[float, float] | None = None
    gated_by: str | None = None
    """Name of the part that zeroes this one."""
    gate_min: float = 1.0
    normalize: Literal["none", "group", "batch"] = "none"
    lowest: float = 0.0
    highest: float = 1.0
    """What the metric itself can give."""


def combine(groups: Sequence[Group], rules: Sequence[Rule], reward_clip: tuple[float, float] | None) -> list[Group]:
    """The groups with `reward` and, where a part is normalised, `shaped_reward`; parts know what they count as.

    `groups`: the whole batch; each rollout has a part for each rule, in the rules' order."""
    counted = [replace(group, rollouts=[_counted(rollout, rules) for rollout in group.rollouts]) for group in groups]
    rewarded = [
        replace(group, rollouts=[replace(r, reward=_sum(r.parts, _values(r), reward_clip)) for r in group.rollouts])
        for group in counted
    ]
    if all(rule.normalize == "none" for rule in rules):
        return rewarded
    return _shape(rewarded, rules, reward_clip)


# ---------------------------------------------------------------- clip and gates
def _counted(rollout: Rollout, rules: Sequence[Rule]) -> Rollout:
    counted = dict(zip((rule.name for rule in rules), count(rollout.parts, rules), strict=True))
    return replace(rollout, parts=[replace(part, counted=counted[part.name]) for part in rollout.parts])


def count(parts: Sequence[RewardPart], rules: Sequence[Rule]) -> list[float | None]:
    """What each part of one completion counts as, None where it abstained. Gates must not form a circle."""
    values = {part.name: part.value for part in parts}
    by_name = {rule.name: rule for rule in rules}
    counted: dict[str, float | None] = {}

    def settle(name: str) -> float | None:
        if name not in counted:
            rule, value = by_name[name], values[name]
            gate = settle(rule.gated_by) if rule.gated_by else None
            counted[name] = value if value is None else 0.0 if _is_shut(gate, rule) else _clipped(value, rule.clip)
        return counted[name]

    return [settle(rule.name) for rule in rules]


def _is_shut(gate: float | None, rule: Rule) -> bool:
    return gate is not None and gate < rule.gate_min


def _clipped(value: float, bounds: tuple[float, float] | None) -> float:
    return value if bounds is None else min(max(value, bounds[0]), bounds[1])


def _values(rollout: Rollout) -> list[float | None]:
    return [part.counted for part in rollout.parts]


def _sum(
    parts: Sequence[RewardPart], values: Sequence[float | None], reward_clip: tuple[float, float] | None
) -> float | None:
    products = [part.weight * value for part, value in zip(parts, values, strict=True) if value is not None]
    return _clipped(sum(products), reward_clip) if products else None


# ---------------------------------------------------------------- normalisation
def _shape(groups: Sequence[Group], rules: Sequence[Rule], reward_clip: tuple[float, float] | None) -> list[Group]:
    """`shaped_reward` of every judged completion."""
    columns = [_normalized_column(groups, index, rule) for index, rule in enumerate(rules)]
    rows = iter(zip(*columns, strict=True))
    return [
        replace(
            group,
            rollouts=[replace(r, shaped_reward=_sum(r.parts, next(rows), reward_clip)) for r in group.rollouts],
        )
        for group in groups
    ]


def _normalized_column(groups: Sequence[Group], index: int, rule: Rule) -> list[float | None]:
    """One part's values over the batch, in order of its completions."""
    by_group = [[rollout.parts[index].counted for rollout in group.rollouts] for group in groups]
    flat = [value for values in by_group for value in values]
    if rule.normalize == "none":
        return flat
    if rule.normalize == "batch":
        return normalized(flat)
    return [value for values in by_group for value in normalized(values)]


def normalized(values: Sequence[float | None]) -> list[float | None]:
    """Distance of each value from the mean in population deviations; None stays None and counts in neither.

    Example: normalized([1.0, 0.0, None]) == [1.0, -1.0, None]"""
    known = [value for value in values if value is not None]
    if not known:
        return list(values)
    mean = math.fsum(known) / len(known)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in known) / len(known))
    if deviation < RELATIVE_STD_FLOOR * max(1.0, abs(mean)):
        return [None if value is None else 0.0 for value in values]
    return [None if value is None else (value - mean) / deviation for value in values]


# ---------------------------------------------------------------- bounds
def bounds(rules: Iterable[Rule], reward_clip: tuple[float, float] | None) -> tuple[float, float]:
    """Lowest and highest reward that the parts can give when none abstains."""
    lowest = highest = 0.0
    for rule in rules:
        ends = [rule.weight * _clipped(end, rule.clip) for end in (rule.lowest, rule.highest)]
        if rule.gated_by:
            ends.append(0.0)
        lowest, highest = lowest + min(ends), highest + max(ends)
    return _clipped(lowest, reward_clip), _clipped(highest, reward_clip)
