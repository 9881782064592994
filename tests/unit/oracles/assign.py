"""The advantage step of a whole batch, naively, and random batches to compare on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from grpo_engine.config import RLStage
from grpo_engine.types import Completion, Group, Prompt, RewardPart, Rollout
from tests.unit.oracles import advantages
from tests.unit.oracles.losses import kl


def rollout(reward: float | None, logprobs: Sequence[float] = (-1.0, -1.0), **fields: Any) -> Rollout:
    """A completion whose full log-probabilities are `logprobs`; the truncated ones are others."""
    finish = fields.pop("finish_reason", "stop")
    completion = Completion([2] * len(logprobs), "", finish, [value / 2 for value in logprobs], list(logprobs))
    return Rollout(completion, [RewardPart("r", reward, 1.0)], reward, **fields)


def group(*rollouts: Rollout, name: str = "1-0") -> Group:
    return Group(name, Prompt("p", 0, "1+1=", [1], {}), list(rollouts))


def random_groups(sizes: Sequence[int], seed: int) -> list[Group]:
    draw = random.Random(seed)

    def one() -> Rollout:
        logprobs = [draw.uniform(-3, -0.1) for _ in range(draw.randint(1, 5))]
        known = {name: [v + draw.gauss(0, 0.5) for v in logprobs] for name in ("ref_logprobs", "values")}
        reward = None if draw.random() < 0.2 else draw.gauss(0, 1)
        return rollout(reward, logprobs, finish_reason=draw.choice(["stop", "length"]), **known)

    return [group(*(one() for _ in range(size)), name=f"1-{index}") for index, size in enumerate(sizes)]


def shaped_rewards(groups: Sequence[Group], stage: RLStage, smoothed: float) -> list[list[list[float] | None]]:
    """[group][completion][T]: what each token earned, the reward at the last one; None where nothing was judged."""
    judged = [r.reward for g in groups for r in g.rollouts if r.reward is not None]
    mean = sum(judged) / len(judged)
    shift = 0.9 * smoothed + 0.1 * mean - mean if stage.advantage.smooth_rewards else 0.0
    weight = stage.kl.weight if stage.kl.place == "reward" else 0.0

    def one(r: Rollout) -> list[float] | None:
        if r.reward is None:
            return None
        pairs = zip(r.completion.full_logprobs, r.ref_logprobs or [], strict=True)
        earned = [-weight * kl(policy, reference, 0.0, 0.0, stage.kl.estimator, False) for policy, reference in pairs]
        earned[-1] += r.reward + shift
        return earned

    return [[one(r) for r in g.rollouts] for g in groups]


def group_advantages(groups: Sequence[Group], stage: RLStage, smoothed: float) -> list[float]:
    """One number a completion, in order."""
    found: list[float] = []
    for earned in shaped_rewards(groups, stage, smoothed):
        found += advantages.group_advantages([None if e is None else sum(e) for e in earned], stage.advantage.kind)
    return found


def token_advantages(groups: Sequence[Group], stage: RLStage, smoothed: float) -> list[list[float]]:
    """[T] of each completion, in order; zeros where nothing was judged."""
    form: Any = stage.advantage
    rollouts = [r for g in groups for r in g.rollouts]
    rewards = [e for earned in shaped_rewards(groups, stage, smoothed) for e in earned]
    found, masks = [], []
    for r, earned in zip(rollouts, rewards, strict=True):
        values = r.values or []
        cut = stage.mask_truncated and r.completion.finish_reason == "length"
        by_token = advantages.gae(
            earned or [0.0] * len(values), values, [True] * len(values), form.gamma, form.gae_lambda
        )
        found.append([0.0] * len(values) if earned is None else by_token[0])
        masks.append([earned is not None and not cut] * len(values))
    return advantages.whiten(found, masks) if form.whiten else found
