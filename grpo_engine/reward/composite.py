"""The reward of a stage: its parts, built from the config, scored batch by batch, and made into one number."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from typing import Any

from grpo_engine.config import (
    BertScoreReward,
    CustomReward,
    GymReward,
    JudgeReward,
    ReasoningGymData,
    RewardConfig,
    RewardModelReward,
    RLStage,
    part_names,
)
from grpo_engine.errors import RewardError
from grpo_engine.protocols import RewardFunction
from grpo_engine.reward import combining, gym
from grpo_engine.reward.combining import Rule
from grpo_engine.reward.custom import Custom
from grpo_engine.reward.metric import Closing, Counting, Failing, Informed, Metric
from grpo_engine.reward.pool import Pooled
from grpo_engine.reward.resources import RewardResources
from grpo_engine.types import Completion, Group, Prompt, RewardFault, RewardPart


class Composite:
    """All parts of a stage's reward. Owns their processes: close it on every path."""

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        rules: Sequence[Rule],
        reward_clip: tuple[float, float] | None = None,
        resources: RewardResources | None = None,
    ) -> None:
        """`rules[i]` belongs to `functions[i]`, which has its name."""
        self.functions = list(functions)
        self.reward_clip = reward_clip
        self._gates = {rule.name: rule.gated_by for rule in rules}
        self.rules = [
            replace(rule, gated_by=None) if isinstance(function, Informed) else rule
            for rule, function in zip(rules, functions, strict=True)
        ]
        self._shared = resources or RewardResources()

    @property
    def versions(self) -> dict[str, str]:
        return {function.name: function.version for function in self.functions}

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[list[RewardPart]]:
        """The parts of each completion, in the config's order. `prompts[i]` is the prompt of `completions[i]`."""
        columns: dict[str, list[RewardPart]] = {}
        by_name = {function.name: function for function in self.functions}

        def settle(name: str) -> list[RewardPart]:
            if name not in columns:
                function, gate = by_name[name], self._gates[name]
                if gate is not None and isinstance(function, Informed):
                    given = [part.value for part in settle(gate)]
                    columns[name] = function.score_given(prompts, completions, given)
                else:
                    columns[name] = function.score(prompts, completions)
            return columns[name]

        scored = [settle(function.name) for function in self.functions]
        return [list(parts) for parts in zip(*scored, strict=True)]

    def combine(self, groups: Sequence[Group]) -> list[Group]:
        return combining.combine(groups, self.rules, self.reward_clip)

    def take_counts(self) -> dict[str, float]:
        totals: dict[str, float] = {}
        for teller in [*self.functions, self._shared]:
            for name, count in teller.take_counts().items() if isinstance(teller, Counting) else ():
                totals[name] = totals.get(name, 0.0) + count
        return totals

    def take_faults(self) -> list[RewardFault]:
        return [
            fault for function in self.functions if isinstance(function, Failing) for fault in function.take_faults()
        ]

    def close(self) -> None:
        with ExitStack() as closing:
            closing.callback(self._shared.close)
            for function in self.functions:
                if isinstance(function, Closing):
                    closing.callback(function.close)


# ---------------------------------------------------------------- from the config
def build_rewards(stage: RLStage, resources: RewardResources) -> Composite:
    """The stage's reward. A name that repeats (two accuracy parts with different extraction) becomes accuracy_2.

    Raises RewardError when a custom reward has no source or cannot be loaded; nothing it started is left then."""
    functions: list[RewardFunction] = []
    try:
        for part, name in zip(stage.rewards, part_names(stage.rewards), strict=True):
            function = _build(part, stage, resources)
            function.name = name
            functions.append(function)
        return Composite(functions, rules_of(stage), stage.reward_clip, resources)
    except BaseException:
        Composite(functions, rules_of(stage)[: len(functions)], None, resources).close()
        raise


def _build(part: RewardConfig, stage: RLStage, resources: RewardResources) -> RewardFunction:
    match part:
        case GymReward():
            assert isinstance(stage.data, ReasoningGymData), "the config refuses a gym reward without gym data"
            made = gym.metric(part, stage.data.task, stage.data.model_dump(mode="json")["options"])
            return _pooled(made, part, resources)
        case CustomReward():
            if part.name not in resources.custom_sources:
                raise RewardError(f"the custom reward {part.name!r} has no source; register it, or pass --reward")
            return Custom(part.name, part.weight, resources.custom_sources[part.name], part.time_limit_s)
        case BertScoreReward() | RewardModelReward() | JudgeReward():
            if resources.learned is None:
                raise RewardError(f"the part {part.kind} needs a model, and none can be loaded here")
            return resources.learned(part)
    return _by_rules(part, resources)


def _by_rules(part: RewardConfig, resources: RewardResources) -> RewardFunction:
    """A rule-based metric: one module a kind, loaded when a config first asks for it, since each brings libraries."""
    module: Any = import_module(f"grpo_engine.reward.{part.kind}")
    if part.kind == "code_execution":
        tested: RewardFunction = module.metric(part, resources.runner())
        return tested
    return _pooled(module.metric(part), part, resources)


def _pooled(function: RewardFunction, part: RewardConfig, resources: RewardResources) -> RewardFunction:
    """A slow metric judges in processes that can be killed, where there are any."""
    if isinstance(function, Metric) and function.slow and (pool := resources.pool()) is not None:
        return Pooled(function, part, pool)
    return function


# ---------------------------------------------------------------- how parts enter the reward
def rules_of(stage: RLStage) -> list[Rule]:
    return [_rule(part, name) for part, name in zip(stage.rewards, part_names(stage.rewards), strict=True)]


def _rule(part: RewardConfig, name: str) -> Rule:
    lowest, highest = _own_range(part)
    return Rule(name, part.weight, part.clip, part.gated_by, part.gate_min, part.normalize, lowest, highest)


def _own_range(part: RewardConfig) -> tuple[float, float]:
    """Of the metric itself. What a user's function and a bare model score may give, nobody knows: what clip lets
    through, else [0, 1] is taken."""
    unknown = part.kind == "custom" or (isinstance(part, RewardModelReward) and part.squash == "none")
    return part.clip if unknown and part.clip is not None else (0.0, 1.0)


def reward_bounds(stage: RLStage) -> tuple[float, float]:
    """Lowest and highest reward that the parts can give."""
    return combining.bounds(rules_of(stage), stage.reward_clip)
