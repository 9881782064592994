"""How sure the rewards are: whether their parts agree on which completion is better, and how far each part spreads.

Two parts disagree on two completions of a group when each of them tells the two apart and they prefer different ones;
a part of negative weight is read the other way round. `reward/part_disagreement` is the share of such pairs among those
on which both have an opinion (Kendall's discordant pairs), over all parts and groups: 0 when all say the same, 0.5 when
they know nothing of each other, near 1 when one punishes what another rewards.

`reward/part/<name>/spread` is the part's standard deviation within groups, the root of the mean variance. Of a reward
model or a judge it tells how much of the advantage is its opinion.

`reward/learned_spread` is the mean, over completions, of the standard deviation between the values of the learned
parts (bertscore, reward models, judges): an ensemble's uncertainty. It rises where a policy leaves what they were
trained on. Values count as they are, so parts should share a range; a part that abstained is left out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from grpo_engine.types import Group

MAX_COMPLETIONS = 64
"""Of a group that are compared with each other; more would cost their square."""
Values = npt.NDArray[np.float64]


def uncertainty(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of a batch; without two parts that have opinions there is no disagreement to tell."""
    judged = [group for group in groups if group.rollouts and group.rollouts[0].parts]
    if not judged:
        return {}
    tables = [_values(group) for group in judged]
    names = [part.name for part in judged[0].rollouts[0].parts]
    spreads = {
        f"reward/part/{name}/spread": spread
        for index, name in enumerate(names)
        if (spread := _spread([table[index] for table in tables])) is not None
    }
    against, common = np.sum([_pairs(table[:, :MAX_COMPLETIONS]) for table in tables], axis=0)
    return spreads | ({"reward/part_disagreement": float(against / common)} if common else {})


def learned_spread(groups: Sequence[Group], names: Collection[str]) -> dict[str, float]:
    """The metric over completions that at least two of the parts `names` judged; {} where there are none."""
    judged = [
        [part.value for part in rollout.parts if part.name in names and part.value is not None]
        for group in groups
        for rollout in group.rollouts
    ]
    spreads = [float(np.std(values)) for values in judged if len(values) > 1]
    return {"reward/learned_spread": math.fsum(spreads) / len(spreads)} if spreads else {}


def _values(group: Group) -> Values:
    """[parts, completions]; NaN where a part abstained; parts of negative weight turned round."""
    columns = [
        [np.nan if part.value is None else math.copysign(1.0, part.weight) * part.value for part in rollout.parts]
        for rollout in group.rollouts
    ]
    return np.array(columns, dtype=np.float64).T


def _pairs(table: Values) -> tuple[float, float]:
    """Pairs of completions that two parts order in opposite ways, and those that both order at all."""
    differences = table[:, :, None] - table[:, None, :]
    signs = np.sign(np.nan_to_num(differences)).reshape(len(table), -1)
    agreement, opinions = signs @ signs.T, np.abs(signs) @ np.abs(signs).T
    upper = np.triu_indices(len(table), k=1)
    common = float(opinions[upper].sum())
    return (common - float(agreement[upper].sum())) / 2, common


def _spread(rows: Sequence[Values]) -> float | None:
    """Root of the mean variance within groups, over groups with at least two values."""
    known = [row[~np.isnan(row)] for row in rows]
    variances = [float(np.var(row)) for row in known if len(row) > 1]
    return math.sqrt(sum(variances) / len(variances)) if variances else None
