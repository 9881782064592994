"""The pipeline's advantage step: a whole batch of scored groups gets advantages, and reasons to be dropped.

What an advantage is computed from (`shaped_reward`; the reward itself is never overwritten):

    shaped = base + (smoothed - batch mean) - kl.weight x sum over tokens of k_t

- base is the reward, or, where a part is normalised, the `shaped_reward` that combining its parts gave;
- the shift exists with advantage.smooth_rewards: smoothed = 0.9 old + 0.1 batch mean over the judged completions' raw
  rewards, the first one the batch mean itself. Group-relative advantages cancel any shift, so raw and smoothed rewards
  give the same gradient there; PPO's critic sees steadier returns;
- KL exists with kl.place reward. k_t compares the sampler's log-probabilities with the reference's, both of the full
  distribution, so it is a constant of the batch. Group forms subtract the completion's sum; PPO subtracts each token's
  own k_t at its token, and adds reward and shift at the last token.

PPO's token advantages are whitened over all trained tokens of the batch at once (with minibatches 1 that is the step),
after the returns were taken. Completions that were not judged, or cut ones with mask_truncated, are not among them.

A group is dropped as `all_abstained`, or as `zero_variance` when all its advantages are 0 and no other term of the loss
would have a gradient there: KL in the loss, an entropy bonus, an auxiliary loss on all rows, PPO's value loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from grpo_engine.config import RLStage
from grpo_engine.config_training import AdvantageConfig, GAEAdvantage, KLConfig
from grpo_engine.errors import NonFinite, RewardError
from grpo_engine.training.advantages import group_advantages, scored_rewards
from grpo_engine.training.gae import gae, whiten
from grpo_engine.training.kl import token_kl
from grpo_engine.types import Group, Rollout

KEPT_SHARE = 0.9
"""Of the old smoothed reward; the rest is the batch's mean."""


def assign_advantages(groups: list[Group], stage: RLStage, smoothed: float | None) -> tuple[list[Group], float | None]:
    """New groups with advantage, shaped_reward, dropped and, in PPO, token_advantages and returns; and the smoothed
    reward after this batch (as given when advantage.smooth_rewards is off or nothing was judged). A shaped_reward that
    comes in is what the reward is with its parts normalised.

    Give it the whole batch, from all ranks: smoothing and whitening look across groups. Raises RewardError for a
    non-finite reward, NonFinite for a non-finite KL, ValueError when ref_logprobs or values are missing."""
    form = stage.advantage
    shift = 0.0
    if form.smooth_rewards:
        smoothed, shift = _smooth(groups, smoothed)
    penalties = [[_token_penalties(group, rollout, stage.kl) for rollout in group.rollouts] for group in groups]
    shaped = [
        replace(group, rollouts=[_shaped(r, shift, p) for r, p in zip(group.rollouts, each, strict=True)])
        for group, each in zip(groups, penalties, strict=True)
    ]
    if isinstance(form, GAEAdvantage):
        flat = [penalty for each in penalties for penalty in each]
        last = [_plus(_reward_used(rollout), shift) for group in groups for rollout in group.rollouts]
        assigned = _assign_tokens(shaped, flat, last, form, mask_truncated=stage.mask_truncated)
    else:
        assigned = [_assign_group(group, form) for group in shaped]
    keep_constant = _trains_without_advantage(stage)
    return [replace(group, dropped=_why_dropped(group, keep_constant)) for group in assigned], smoothed


# ---------------------------------------------------------------- what advantages are computed from
def _smooth(groups: Sequence[Group], smoothed: float | None) -> tuple[float | None, float]:
    """The smoothed reward after the batch, and what must be added to its rewards for that mean."""
    judged = scored_rewards([rollout.reward for group in groups for rollout in group.rollouts])
    if not judged:
        return smoothed, 0.0
    mean = math.fsum(judged) / len(judged)
    after = mean if smoothed is None else KEPT_SHARE * smoothed + (1 - KEPT_SHARE) * mean
    return after, after - mean


def _token_penalties(group: Group, rollout: Rollout, config: KLConfig) -> list[float] | None:
    """[T] kl.weight x k_t; None where KL is not in the reward."""
    if config.place != "reward" or config.weight == 0:
        return None
    if rollout.ref_logprobs is None:
        raise ValueError(f"group {group.id}: a rollout has no ref_logprobs, which KL in the reward needs")
    pairs = zip(rollout.completion.full_logprobs, rollout.ref_logprobs, strict=True)
    penalties = [config.weight * token_kl(policy, reference, config.estimator) for policy, reference in pairs]
    if not all(map(math.isfinite, penalties)):
        raise NonFinite(
            f"group {group.id}: the KL to the reference is not finite; log-probabilities of sampler or reference broke"
        )
    return penalties


def _shaped(rollout: Rollout, shift: float, penalties: list[float] | None) -> Rollout:
    base = _reward_used(rollout)
    if base is None or (shift == 0 and penalties is None):
        return rollout
    return replace(rollout, shaped_reward=base + shift - math.fsum(penalties or ()))


def _plus(base: float | None, shift: float) -> float | None:
    return None if base is None else base + shift


def _reward_used(rollout: Rollout) -> float | None:
    return rollout.reward if rollout.shaped_reward is None else rollout.shaped_reward


# ---------------------------------------------------------------- group-relative forms
def _assign_group(group: Group, form: AdvantageConfig) -> Group:
    try:
        advantages = group_advantages([_reward_used(rollout) for rollout in group.rollouts], form)
    except RewardError as error:
        raise RewardError(f"group {group.id}: {error}") from error
    rollouts = [replace(r, advantage=advantage) for r, advantage in zip(group.rollouts, advantages, strict=True)]
    return replace(group, rollouts=rollouts)


# ---------------------------------------------------------------- PPO
def _assign_tokens(
    groups: Sequence[Group],
    penalties: Sequence[list[float] | None],
    last: Sequence[float | None],
    form: GAEAdvantage,
    *,
    mask_truncated: bool,
) -> list[Group]:
    """`penalties`, and what is added at the `last` token, one a rollout, in order of groups."""
    for group in groups:
        scored_rewards([rollout.reward for rollout in group.rollouts])
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    pairs = [_estimate(*given, form) for given in zip(rollouts, penalties, last, strict=True)]
    advantages = [advantage for advantage, _ in pairs]
    if form.whiten:
        trained = [r.reward is not None and not (mask_truncated and _is_cut(r)) for r in rollouts]
        masks = [[on] * len(advantage) for on, advantage in zip(trained, advantages, strict=True)]
        advantages = whiten(advantages, masks)
    finished: Iterator[Rollout] = (
        _with_tokens(rollout, advantage, returns)
        for rollout, advantage, (_, returns) in zip(rollouts, advantages, pairs, strict=True)
    )
    return [replace(group, rollouts=[next(finished) for _ in group.rollouts]) for group in groups]


def _estimate(
    rollout: Rollout, penalties: list[float] | None, last: float | None, form: GAEAdvantage
) -> tuple[list[float], list[float]]:
    """Advantages before whitening and returns, each [T]; zeros for a completion that was not judged."""
    length = len(rollout.completion.token_ids)
    if last is None or length == 0:
        return [0.0] * length, [0.0] * length
    if rollout.values is None:
        raise ValueError("a rollout has no values; advantage gae needs a value model's scores")
    rewards = [-penalty for penalty in penalties] if penalties is not None else [0.0] * length
    rewards[-1] += last
    return gae(rewards, rollout.values, [True] * length, form.gamma, form.gae_lambda)


def _with_tokens(rollout: Rollout, advantages: list[float], returns: list[float]) -> Rollout:
    if rollout.reward is None:
        return replace(rollout, advantage=0.0, token_advantages=None, returns=None)
    mean = math.fsum(advantages) / max(1, len(advantages))
    return replace(rollout, advantage=mean, token_advantages=advantages, returns=returns)


def _is_cut(rollout: Rollout) -> bool:
    return rollout.completion.finish_reason == "length"


# ---------------------------------------------------------------- what is left out
def _trains_without_advantage(stage: RLStage) -> bool:
    """Whether a group without advantages has a gradient all the same."""
    return (
        isinstance(stage.advantage, GAEAdvantage)
        or (stage.kl.weight > 0 and stage.kl.place == "loss")
        or stage.entropy.bonus > 0
        or (stage.auxiliary.weight > 0 and stage.auxiliary.rows == "all")
    )


def _why_dropped(group: Group, keep_constant: bool) -> str | None:
    if all(rollout.reward is None for rollout in group.rollouts):
        return "all_abstained"
    if not keep_constant and all(rollout.advantage == 0 for rollout in group.rollouts):
        return "zero_variance"
    return None
