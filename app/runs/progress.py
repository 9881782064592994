"""How far a run is, read from its newest attempt's journal: what the runs table and the page's head show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grpo_engine import events
from grpo_engine.events import AnyEvent

REWARD = "reward/mean"
MAX_SPARKLINE_POINTS = 60


def steps_of_stages(config: Mapping[str, Any]) -> list[int]:
    """Optimizer steps of each stage of a run's config."""
    return [int(stage["num_steps"]) for stage in config.get("stages", [])]


def stage_index(stage: str) -> int:
    """Example: stage_index("1-rl") == 1."""
    return int(stage.partition("-")[0])


def steps_before(stages: Sequence[int], index: int) -> int:
    """Steps of all stages before stage `index`."""
    return sum(stages[:index])


def progress(config: Mapping[str, Any], sparkline: Sequence[float], journal: Iterable[AnyEvent]) -> dict[str, Any]:
    """New values of a run's progress columns after these events; empty when they tell nothing about it."""
    stages = steps_of_stages(config)
    changes: dict[str, Any] = {}
    rewards = list(sparkline)
    for event in journal:
        match event:
            case events.Started():
                kind = config["stages"][event.stage_index]["kind"] if event.stage_index < len(stages) else ""
                changes |= _place(stages, f"{event.stage_index}-{kind}", event.step)
            case events.StageStarted() if event.stage:
                changes |= _place(stages, event.stage, event.step) | {"stage_steps": event.num_steps}
            case events.Trained() if event.stage:
                changes |= _place(stages, event.stage, event.step) | {"last_step_at": event.time}
            case events.Metrics() if event.stage and (reward := event.values.get(REWARD)) is not None:
                changes["last_reward"] = reward
                index = stage_index(event.stage)
                total = stages[index] if index < len(stages) else event.step
                rewards = add_to_sparkline(rewards, event.step, total, reward)
                changes["sparkline"] = rewards
            case _:
                continue
    return changes


def add_to_sparkline(rewards: Sequence[float], step: int, num_steps: int, reward: float) -> list[float]:
    """The stage's rewards in at most 60 equal spans of steps, the last reward of each; what lies after `step` goes.

    Example: add_to_sparkline([0.1, 0.2, 0.3], step=2, num_steps=40, reward=0.5) == [0.1, 0.5]
    """
    points = min(num_steps, MAX_SPARKLINE_POINTS)
    index = min((step - 1) * points // max(num_steps, 1), points - 1)
    kept = list(rewards[:index])
    kept += [kept[-1] if kept else reward] * (index - len(kept))
    return [*kept, reward]


def _place(stages: Sequence[int], stage: str, step: int) -> dict[str, Any]:
    index = stage_index(stage)
    place: dict[str, Any] = {
        "stage": stage,
        "step": step,
        "steps_done": steps_before(stages, index) + step,
        "total_steps": sum(stages),
    }
    if index < len(stages):
        place["stage_steps"] = stages[index]
    return place
