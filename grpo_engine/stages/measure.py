"""Numbers of a batch of rollouts, by their names in the metric catalogue."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from grpo_engine.protocols import Communicator, Sampler
from grpo_engine.stages.agreement import uncertainty
from grpo_engine.stages.reward_watch import BatchReward
from grpo_engine.types import Group, Rollout

PAGE_BYTES = 4096
SUMMED = (
    "rollout/drafted_tokens", "rollout/straggler_rows", "rollout/servers_ready", "rollout/requests_retried",
)  # fmt: skip
"""Metrics of a sampler that count something, over all ranks; the others are means of the ranks."""


def batch_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Reward, length and group statistics over all completions of a batch; judged ones only where rewards are meant."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [len(rollout.completion.token_ids) for rollout in rollouts]
    values = {
        "completion/mean_length_tokens": _mean(lengths),
        "completion/max_length_tokens": float(max(lengths)),
        "completion/truncated_share": _mean([r.completion.finish_reason == "length" for r in rollouts]),
        "groups/zero_variance_share": _mean([_is_constant(group) for group in groups]),
        "groups/trained": float(sum(group.dropped is None for group in groups)),
        "advantage/abs_mean": _mean([abs(rollout.advantage) for rollout in rollouts]),
    }
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    if rewards:
        mean = _mean(rewards)
        values |= {
            "reward/mean": mean,
            "reward/std": math.sqrt(_mean([(reward - mean) ** 2 for reward in rewards])),
            "reward/min": min(rewards),
            "reward/max": max(rewards),
        }
    return values | _part_metrics(rollouts) | _behaviour_metrics(rollouts) | uncertainty(groups)


def batch_reward(groups: Sequence[Group]) -> BatchReward | None:
    """Mean reward of the judged completions; None with fewer than two judged groups, which tell no error."""
    judged = [[rollout.reward for rollout in group.rollouts if rollout.reward is not None] for group in groups]
    means = [_mean(rewards) for rewards in judged if rewards]
    if len(means) < 2:
        return None
    error = statistics.stdev(means) / math.sqrt(len(means))
    return BatchReward(_mean([reward for rewards in judged for reward in rewards]), error)


def _part_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    values: dict[str, float] = {}
    for name in dict.fromkeys(part.name for rollout in rollouts for part in rollout.parts):
        judged = [part.value for rollout in rollouts for part in rollout.parts if part.name == name]
        known = [value for value in judged if value is not None]
        values[f"reward/part/{name}/abstained_share"] = 1 - len(known) / len(judged)
        if known:
            values[f"reward/part/{name}/mean"] = _mean(known)
    return values


def _behaviour_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Mean number of times a completion shows each behaviour."""
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.behaviours)
    return {f"behaviour/{name}": _mean([rollout.behaviours.get(name, 0) for rollout in rollouts]) for name in names}


def sampled_kl(groups: Sequence[Group]) -> float | None:
    """Mean k3 estimate of KL(sampler || reference) over all sampled tokens, nats; None where no reference was scored.

    The learner measures it on the tokens it trains on; this serves a batch of which it trained on none."""
    scored = [rollout for group in groups for rollout in group.rollouts if rollout.ref_logprobs is not None]
    if not scored:
        return None
    reference = np.concatenate([np.asarray(rollout.ref_logprobs) for rollout in scored])
    gap = reference - np.concatenate([np.asarray(rollout.completion.full_logprobs) for rollout in scored])
    return float(np.mean(np.expm1(gap) - gap))


def sampler_metrics(sampler: Sampler, ranks: Communicator) -> dict[str, float]:
    """What the samplers of all ranks tell since they were last asked. Collective."""
    told = ranks.gather(sampler.take_metrics())
    names = dict.fromkeys(name for values in told for name in values)
    by_name = {name: [values[name] for values in told if name in values] for name in names}
    return {name: math.fsum(found) if name in SUMMED else _mean(found) for name, found in by_name.items()}


def dropped_groups(groups: Sequence[Group]) -> dict[str, int]:
    """Reason -> number of groups that were not trained on."""
    reasons = [group.dropped for group in groups if group.dropped is not None]
    return {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)}


def resident_bytes() -> float:
    """Resident memory of this process."""
    return float(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def _is_constant(group: Group) -> bool:
    rewards = {rollout.reward for rollout in group.rollouts if rollout.reward is not None}
    return len(rewards) <= 1


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
