"""The reward of a stage: its parts, built from the config, scored, and summed by weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grpo_engine.config import (
    AccuracyReward,
    CustomReward,
    FormatReward,
    GymReward,
    LengthReward,
    ReasoningGymData,
    RewardConfig,
    RLStage,
)
from grpo_engine.errors import RewardError
from grpo_engine.protocols import RewardFunction
from grpo_engine.reward.accuracy import Accuracy
from grpo_engine.reward.custom import Custom
from grpo_engine.reward.format import Format
from grpo_engine.reward.gym import Gym
from grpo_engine.reward.length import Length
from grpo_engine.types import Completion, Prompt, RewardPart


def build_rewards(stage: RLStage, custom_sources: Mapping[str, str]) -> list[RewardFunction]:
    """The stage's reward functions in config order. `custom_sources`: registered name -> source text.

    A name that repeats (two accuracy parts with different extraction) becomes accuracy_2, so that parts stay apart.
    Raises RewardError when a custom reward has no source or cannot be loaded.
    """
    functions: list[RewardFunction] = []
    for part, name in zip(stage.rewards, part_names(stage), strict=True):
        function = _build(part, stage, custom_sources)
        function.name = name
        functions.append(function)
    return functions


def part_names(stage: RLStage) -> list[str]:
    """Names of the stage's reward parts, each once: ["accuracy", "format", "accuracy_2"]."""
    names: list[str] = []
    for part in stage.rewards:
        wanted = part.name if isinstance(part, CustomReward) else part.kind
        name, number = wanted, 2
        while name in names:
            name, number = f"{wanted}_{number}", number + 1
        names.append(name)
    return names


def _build(part: RewardConfig, stage: RLStage, custom_sources: Mapping[str, str]) -> RewardFunction:
    match part:
        case AccuracyReward():
            return Accuracy(part.weight, part.extract)
        case FormatReward():
            return Format(part.weight)
        case LengthReward():
            return Length(part.weight, part.max_tokens, part.buffer_tokens)
        case GymReward():
            assert isinstance(stage.data, ReasoningGymData), "the config refuses a gym reward without gym data"
            return Gym(part.weight, part.extract, stage.data.task, stage.data.options)
        case CustomReward():
            if part.name not in custom_sources:
                raise RewardError(f"the custom reward {part.name!r} has no source; register it, or pass --reward")
            return Custom(part.name, part.weight, custom_sources[part.name])


def score_all(
    rewards: Sequence[RewardFunction], prompts: Sequence[Prompt], completions: Sequence[Completion]
) -> list[list[RewardPart]]:
    """The parts of each completion, in the order of `rewards`. `prompts[i]` is the prompt of `completions[i]`."""
    columns = [reward.score(prompts, completions) for reward in rewards]
    return [list(parts) for parts in zip(*columns, strict=True)]


def combine(parts: Sequence[RewardPart]) -> float | None:
    """Sum of weight x value over the parts that did not abstain; None when all did."""
    judged = [part.weight * part.value for part in parts if part.value is not None]
    return sum(judged) if judged else None


def reward_bounds(stage: RLStage) -> tuple[float, float]:
    """Lowest and highest reward that the parts can give. A custom part is taken to lie in [0, 1]."""
    lowest = highest = 0.0
    for part in stage.rewards:
        ends = [part.weight * end for end in ((-1.0, 0.0) if part.kind == "length" else (0.0, 1.0))]
        lowest, highest = lowest + min(ends), highest + max(ends)
    return lowest, highest
