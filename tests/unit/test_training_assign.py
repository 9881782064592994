from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_engine.config import RLStage
from grpo_engine.config_training import GRPOAdvantage
from grpo_engine.errors import NonFinite, RewardError
from grpo_engine.training import assign as module
from grpo_engine.training.advantages import group_advantages
from grpo_engine.training.assign import assign_advantages
from grpo_engine.types import Group
from tests.unit.oracles import assign as oracle
from tests.unit.oracles.assign import group, rollout
from tests.unit.oracles.mutation import mutant

Rewards = Sequence[float | None]
IN_REWARD = {"weight": 0.5, "place": "reward", "estimator": "k1"}


def stage(kind: str = "grpo", **changes: Any) -> RLStage:
    advantage = {"kind": kind} | changes.pop("advantage", {})
    fixed = {"data": {"source": "addition"}, "rewards": [{"kind": "accuracy"}], "advantage": advantage}
    return RLStage.model_validate(fixed | changes)


def group_of(rewards: Rewards, name: str = "1-0") -> Group:
    return group(*map(rollout, rewards), name=name)


def column(groups: Sequence[Group], name: str) -> list[Any]:
    return [getattr(rollout, name) for group in groups for rollout in group.rollouts]


# ---------------------------------------------------------------- group-relative forms
@pytest.mark.parametrize("kind", ["grpo", "seed_paper", "dr_grpo", "rloo", "rank"])
def test_groups_of_any_size_are_kept_apart(kind: str) -> None:
    rewards: list[Rewards] = [[1.0, 0.0, 0.5, 0.5], [3.0], [None, 2.0, 7.0]]
    chosen = stage(kind)
    groups, smoothed = assign_advantages([group_of(r, f"1-{i}") for i, r in enumerate(rewards)], chosen, 0.25)
    assert [[r.advantage for r in g.rollouts] for g in groups] == [
        group_advantages(r, chosen.advantage) for r in rewards
    ]
    assert [g.id for g in groups] == ["1-0", "1-1", "1-2"]
    assert (smoothed, column(groups, "shaped_reward")) == (0.25, [None] * 8)
    assert column(groups, "token_advantages") == column(groups, "returns") == [None] * 8


def test_the_given_groups_and_their_rewards_stay_as_they_are() -> None:
    given = group(rollout(1.0, ref_logprobs=[-2.0, -1.0]), rollout(0.0, ref_logprobs=[-1.0, -1.0]))
    groups, _ = assign_advantages([given], stage(kl=IN_REWARD, advantage={"smooth_rewards": True}), 9.0)
    assert column([given], "advantage") == [0.0, 0.0]
    assert column(groups, "reward") == [1.0, 0.0]
    assert column(groups, "parts") == column([given], "parts")


def test_kl_in_the_reward_is_subtracted_as_a_sum_over_tokens() -> None:
    rows = [rollout(1.0, [-1.0, -0.5], ref_logprobs=[-1.5, -1.5]), rollout(1.0, [-1.0], ref_logprobs=[-1.0])]
    groups, _ = assign_advantages([group(*rows)], stage("dr_grpo", kl=IN_REWARD), None)
    assert column(groups, "shaped_reward") == pytest.approx([1 - 0.5 * 1.5, 1.0])
    assert column(groups, "advantage") == pytest.approx([-0.375, 0.375])
    assert groups[0].dropped is None  # the rewards are equal, what was shaped of them is not


def test_kl_in_the_loss_leaves_the_reward_alone() -> None:
    rows = [rollout(r, ref_logprobs=[-3.0, -2.0]) for r in (1.0, 0.0)]
    groups, _ = assign_advantages([group(*rows)], stage(kl={"weight": 0.5}), None)
    assert column(groups, "shaped_reward") == [None, None]


@pytest.mark.parametrize("kl", [{}, {"weight": 0.0, "place": "reward"}])
def test_without_kl_in_the_reward_no_reference_is_needed(kl: dict[str, Any]) -> None:
    groups, _ = assign_advantages([group_of([1.0, 0.0])], stage(kl=kl), None)
    assert column(groups, "advantage") == group_advantages([1.0, 0.0], GRPOAdvantage())


# ---------------------------------------------------------------- smoothing
def test_smoothing_shifts_the_batch_to_the_smoothed_mean() -> None:
    smooth = stage("dr_grpo", advantage={"smooth_rewards": True})
    batches = [[group_of([1.0, 0.0]), group_of([None, 2.0])], [group_of([3.0, 2.0])], [group_of([None, None])]]
    first, after_first = assign_advantages(batches[0], smooth, None)
    assert (after_first, column(first, "shaped_reward")) == (1.0, [None, None, None, None])  # its mean: no shift
    second, after_second = assign_advantages(batches[1], smooth, after_first)
    assert after_second == pytest.approx(0.9 * 1.0 + 0.1 * 2.5)
    assert column(second, "shaped_reward") == pytest.approx([3 - 1.35, 2 - 1.35])
    assert assign_advantages(batches[2], smooth, after_second)[1] == after_second


@pytest.mark.parametrize("kind", ["grpo", "seed_paper", "dr_grpo", "rloo", "rank"])
def test_smoothing_leaves_group_advantages_as_they_are(kind: str) -> None:
    batch = [group_of([1.0, 0.0, 0.25]), group_of([5.0, None, 2.0])]
    raw, _ = assign_advantages(batch, stage(kind), None)
    smooth, _ = assign_advantages(batch, stage(kind, advantage={"smooth_rewards": True}), -20.0)
    assert column(smooth, "shaped_reward")[0] != 1.0
    assert column(smooth, "advantage") == pytest.approx(column(raw, "advantage"), abs=1e-9)


# ---------------------------------------------------------------- parts that were normalised
NORMALISED = group(
    rollout(1.0, shaped_reward=-3.0, values=[0.0, 0.0]), rollout(0.0, shaped_reward=5.0, values=[0.0, 0.0])
)


def test_advantages_come_from_the_normalised_reward() -> None:
    [group], smoothed = assign_advantages([NORMALISED], stage("dr_grpo", advantage={"smooth_rewards": True}), 1.5)
    assert smoothed == pytest.approx(0.9 * 1.5 + 0.1 * 0.5)  # of the rewards themselves
    assert column([group], "shaped_reward") == pytest.approx([-3 + 0.9, 5 + 0.9])
    assert column([group], "advantage") == pytest.approx([-4.0, 4.0])


def test_a_critic_sees_the_normalised_reward_too() -> None:
    [group], _ = assign_advantages([NORMALISED], stage("gae", advantage={"whiten": False}), None)
    assert [returns[-1] for returns in column([group], "returns")] == pytest.approx([-3.0, 5.0])


# ---------------------------------------------------------------- what is dropped
GRADIENT_ELSEWHERE: list[dict[str, Any]] = [
    {"kl": {"weight": 0.1}},
    {"entropy": {"bonus": 0.01}},
    {"auxiliary": {"weight": 0.1, "rows": "all"}},
    {"kind": "gae"},
]
NO_GRADIENT_ELSEWHERE: list[dict[str, Any]] = [
    {},
    {"entropy": {"top_share": 0.2}},
    {"auxiliary": {"weight": 0.1}},
    {"kl": {"weight": 0.1, "place": "reward"}},
]


def constant_and_abstained() -> list[Group]:
    known = {"ref_logprobs": [-1.0, -1.0], "values": [0.0, 0.0]}
    return [group(*(rollout(r, **known) for r in rewards)) for rewards in ((1.0, 1.0), (None, None), (1.0, 0.0))]


@pytest.mark.parametrize("changes", NO_GRADIENT_ELSEWHERE)
def test_groups_without_gradient_are_dropped_with_their_reason(changes: dict[str, Any]) -> None:
    groups, _ = assign_advantages(constant_and_abstained(), stage(**changes), None)
    assert [group.dropped for group in groups] == ["zero_variance", "all_abstained", None]


@pytest.mark.parametrize("changes", GRADIENT_ELSEWHERE)
def test_constant_groups_stay_where_another_term_trains_on_them(changes: dict[str, Any]) -> None:
    groups, _ = assign_advantages(constant_and_abstained(), stage(**changes), None)
    assert [group.dropped for group in groups] == [None, "all_abstained", None]


# ---------------------------------------------------------------- PPO
def test_token_advantages_by_hand() -> None:
    rows = [rollout(1.0, values=[0.5, 0.8]), rollout(None, values=[0.1, 0.1])]
    raw = stage("gae", advantage={"gae_lambda": 0.5, "whiten": False})
    groups, _ = assign_advantages([group(*rows)], raw, None)
    done, abstained = groups[0].rollouts
    assert done.token_advantages == pytest.approx([0.4, 0.2])
    assert done.returns == pytest.approx([0.9, 1.0])
    assert (done.advantage, done.shaped_reward) == (pytest.approx(0.3), None)
    assert (abstained.advantage, abstained.token_advantages, abstained.returns) == (0.0, None, None)


def test_kl_and_smoothing_enter_the_token_rewards() -> None:
    row = rollout(1.0, [-1.0, -0.5], ref_logprobs=[-1.5, -1.5], values=[0.0, 0.0])
    settings_ = {"gae_lambda": 1.0, "whiten": False, "smooth_rewards": True}
    groups, smoothed = assign_advantages([group(row)], stage("gae", advantage=settings_, kl=IN_REWARD), 0.0)
    assert smoothed == pytest.approx(0.1)
    # token rewards -0.25 and -0.5 + 1 - 0.9
    assert groups[0].rollouts[0].returns == pytest.approx([-0.65, -0.4])
    assert groups[0].rollouts[0].shaped_reward == pytest.approx(-0.65)


def test_whitening_is_over_all_trained_tokens_of_the_batch() -> None:
    cut = rollout(50.0, [-1.0] * 3, values=[0.0] * 3, finish_reason="length")
    batch = [group(rollout(1.0, values=[0.5, 0.8]), cut), group(rollout(0.0, [-1.0], values=[0.25]), rollout(None))]
    groups, _ = assign_advantages(batch, stage("gae", mask_truncated=True), None)
    trained = [
        a for g in groups for r in g.rollouts if r.completion.finish_reason == "stop" for a in r.token_advantages or []
    ]
    assert len(trained) == 3
    assert math.fsum(trained) == pytest.approx(0, abs=1e-12)
    assert math.fsum(a * a for a in trained) / 2 == pytest.approx(1)
    assert groups[0].rollouts[1].token_advantages == [0.0] * 3
    assert groups[0].rollouts[1].returns == pytest.approx([50 * 0.95**2, 50 * 0.95, 50.0])


def test_an_empty_completion_is_no_trouble() -> None:
    groups, _ = assign_advantages(
        [group(rollout(1.0, [], values=[]), rollout(0.0, values=[0.0, 0.0]))], stage("gae"), None
    )
    assert groups[0].rollouts[0].token_advantages == []


# ---------------------------------------------------------------- oracle and mutants
STAGES = [
    stage(kind, kl=kl, advantage={"smooth_rewards": smooth}, mask_truncated=True)
    for kind in ("grpo", "dr_grpo", "gae")
    for kl in ({"weight": 0.2, "place": "reward", "estimator": "k3"}, {"weight": 0.2})
    for smooth in (True, False)
]
STAGES += [stage("gae", kl=IN_REWARD, advantage={"whiten": False, "smooth_rewards": True, "gamma": 0.9})]


def disagreement(implementation: Any, chosen: RLStage, sizes: Sequence[int], seed: int) -> float:
    """Largest difference to the naive oracle over advantages and shaped rewards."""
    groups = oracle.random_groups(sizes, seed)
    assigned, _ = implementation.assign_advantages(groups, chosen, 0.5)
    found = [r for g in assigned for r in g.rollouts]
    earned = [e for each in oracle.shaped_rewards(groups, chosen, 0.5) for e in each]
    pairs = [(r.shaped_reward, sum(e)) for r, e in zip(found, earned, strict=True) if e and r.shaped_reward is not None]
    if chosen.advantage.kind == "gae":
        for r, wanted in zip(found, oracle.token_advantages(groups, chosen, 0.5), strict=True):
            pairs += zip(r.token_advantages or [0.0] * len(wanted), wanted, strict=True)
            pairs.append((r.advantage, sum(wanted) / len(wanted)))
    else:
        pairs += zip([r.advantage for r in found], oracle.group_advantages(groups, chosen, 0.5), strict=True)
    return max(abs(a - b) for a, b in pairs)


@settings(deadline=None, max_examples=60)
@given(
    chosen=st.sampled_from(STAGES), sizes=st.lists(st.integers(4, 7), min_size=2, max_size=4), seed=st.integers(0, 99)
)
def test_the_whole_step_equals_its_naive_oracle(chosen: RLStage, sizes: list[int], seed: int) -> None:
    assert disagreement(module, chosen, sizes, seed) < 1e-9


MUTATIONS = [
    ("_smooth", "KEPT_SHARE * smoothed + (1 - KEPT_SHARE) * mean", "(1 - KEPT_SHARE) * smoothed + KEPT_SHARE * mean"),
    ("_smooth", "after - mean", "mean - after"),
    ("_token_penalties", 'config.place != "reward"', 'config.place == "reward"'),
    ("_token_penalties", "config.weight * token_kl", "token_kl"),
    ("_token_penalties", "completion.full_logprobs", "completion.logprobs"),
    ("_shaped", "- math.fsum(penalties or ())", ""),
    ("_shaped", "+ shift -", "-"),
    ("_reward_used", "rollout.reward if rollout.shaped_reward is None else rollout.shaped_reward", "rollout.reward"),
    ("_estimate", "-penalty for", "penalty for"),
    ("_estimate", "rewards[-1] +=", "rewards[0] +="),
    ("_plus", "base + shift", "base"),
    ("_with_tokens", "math.fsum(advantages)", "max(advantages)"),
    ("_assign_tokens", "not (mask_truncated and _is_cut(r))", "True"),
    ("_assign_tokens", "if form.whiten:", "if not form.whiten:"),
]


@pytest.mark.parametrize(("function", "original", "mutated"), MUTATIONS)
def test_a_mutated_step_disagrees_with_the_oracle(function: str, original: str, mutated: str) -> None:
    wrong = mutant(module, function, original, mutated)
    assert max(disagreement(wrong, chosen, [4, 3, 2], 0) for chosen in STAGES) > 1e-3


# ---------------------------------------------------------------- what is refused
@pytest.mark.parametrize("kind", ["grpo", "gae"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused(kind: str, bad: float) -> None:
    rows = [rollout(r, values=[0.0, 0.0]) for r in (1.0, bad)]
    with pytest.raises(RewardError, match="must be finite"):
        assign_advantages([group(*rows)], stage(kind), None)


def test_a_kl_that_is_not_finite_is_no_fault_of_the_reward() -> None:
    rows = [rollout(r, ref_logprobs=[math.nan, -1.0]) for r in (1.0, 0.0)]
    with pytest.raises(NonFinite, match="group 1-0: the KL to the reference is not finite"):
        assign_advantages([group(*rows)], stage(kl=IN_REWARD), None)


def test_what_is_needed_and_missing_is_named() -> None:
    with pytest.raises(ValueError, match="group 1-0: a rollout has no ref_logprobs, which KL in the reward needs"):
        assign_advantages([group_of([1.0, 0.0])], stage(kl=IN_REWARD), None)
    with pytest.raises(ValueError, match="no values; advantage gae needs a value model's scores"):
        assign_advantages([group_of([1.0, 0.0])], stage("gae"), None)


def test_a_group_that_was_dropped_before_may_train_again() -> None:
    stale = replace(group_of([1.0, 0.0]), dropped="zero_variance")
    assert assign_advantages([stale], stage("dr_grpo"), None)[0][0].dropped is None
