"""`python -m grpo_engine score`: rewards of given completions, JSON in, JSON out.

Torch-free but for learned parts, which bring it.

In: {"config": {"rewards": […], "reward_clip", "sandbox", "data"}, "sources": {name: source text}, "items": [{"prompt",
"columns", "completion", "num_tokens", "finish_reason"}]}. Items of one prompt are a group. Out: {"items": [{"reward",
"shaped_reward", "parts": […], "behaviours": {…}}], "faults": […], "counts": {…}, "seconds"}, or {"problems": […]} with
exit status 2 when the request cannot be scored. What rewards print goes to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from importlib import import_module
from itertools import groupby
from typing import Any, TypeVar

from pydantic import Field, ValidationError

from grpo_engine.config import DataConfig, RewardConfig, RLStage, SandboxConfig
from grpo_engine.config_base import Config
from grpo_engine.config_errors import problems_of
from grpo_engine.config_gates import learned_names
from grpo_engine.errors import InvalidConfig, Problem, RewardError
from grpo_engine.reward.behaviours import count_behaviours
from grpo_engine.reward.composite import Composite, build_rewards
from grpo_engine.reward.resources import Learned, RewardResources
from grpo_engine.types import Completion, FinishReason, Group, Prompt, Rollout

CHARACTERS_PER_TOKEN = 4
"""A guess, where the number of tokens is not given: text that was pasted was never tokenized."""
MAX_ITEMS = 4096
Model = TypeVar("Model", bound=Config)


class ScoreConfig(Config):
    """The part of a run's config that rewards depend on."""

    rewards: list[RewardConfig] = Field(min_length=1)
    reward_clip: tuple[float, float] | None = None
    sandbox: SandboxConfig = SandboxConfig()
    data: DataConfig | None = None
    """Of the stage; the gym reward takes its task from it."""

    def stage(self) -> RLStage:
        """Raises InvalidConfig where the parts do not fit together."""
        data = {"source": "addition"} if self.data is None else self.data.model_dump()
        rewards = [part.model_dump() for part in self.rewards]
        return _validated(RLStage, {"data": data, "rewards": rewards, "reward_clip": self.reward_clip})


class ScoreItem(Config):
    """One completion."""

    prompt: str = ""
    """As the model reads it, after the chat template: one that ends with <think> opens the thinking."""
    columns: dict[str, Any] = Field(default_factory=dict)
    """The dataset row, with the gold `answer`."""
    completion: str
    num_tokens: int | None = Field(None, ge=0)
    """None = a guess from the text's length."""
    finish_reason: FinishReason = "stop"


class ScoreRequest(Config):
    config: ScoreConfig
    sources: dict[str, str] = Field(default_factory=dict)
    """Source text of users' own rewards by name."""
    items: list[ScoreItem] = Field(min_length=1, max_length=MAX_ITEMS)


def score(request: ScoreRequest) -> dict[str, Any]:
    """What the module's docstring says. Raises RewardError when a part cannot be built, InvalidConfig when the parts do
    not fit together. Call it in a process's main thread."""
    started = time.monotonic()
    resources = RewardResources(request.sources, request.config.sandbox, num_processes=1)
    if learned_names(request.config.rewards):
        resources.learned = learned_parts()
    with closing(build_rewards(request.config.stage(), resources)) as rewards:
        groups = rewards.combine(_scored_groups(request.items, rewards))
        counts, faults = rewards.take_counts(), rewards.take_faults()
    return {
        "items": [_answer(rollout) for group in groups for rollout in group.rollouts],
        "faults": [asdict(fault) for fault in faults],
        "counts": counts,
        "seconds": round(time.monotonic() - started, 3),
    }


def learned_parts() -> Learned:
    """Builds parts that need a model. Named, not imported: what it may load has no place in a torch-free module."""
    rewards: Learned = import_module("grpo_engine.learned_rewards").LearnedRewards()
    return rewards


def _scored_groups(items: Sequence[ScoreItem], rewards: Composite) -> list[Group]:
    prompts = [Prompt(f"item/{i}", i, item.prompt, [], item.columns) for i, item in enumerate(items)]
    completions = [_completion(item) for item in items]
    parts = rewards.score(prompts, completions)
    groups: list[Group] = []
    for _, members in groupby(range(len(items)), key=lambda i: (items[i].prompt, items[i].columns)):
        indices = list(members)
        rollouts = [
            Rollout(completions[i], parts[i], None, behaviours=count_behaviours(completions[i].text)) for i in indices
        ]
        groups.append(Group(f"score-{len(groups)}", prompts[indices[0]], rollouts))
    return groups


def _completion(item: ScoreItem) -> Completion:
    guess = -(-len(item.completion) // CHARACTERS_PER_TOKEN)
    token_ids = [0] * (guess if item.num_tokens is None else item.num_tokens)
    return Completion(token_ids, item.completion, item.finish_reason, [], [])


def _answer(rollout: Rollout) -> dict[str, Any]:
    parts = [asdict(part) for part in rollout.parts]
    return {
        "reward": rollout.reward,
        "shaped_reward": rollout.shaped_reward,
        "num_tokens": len(rollout.completion.token_ids),
        "parts": parts,
        "behaviours": rollout.behaviours,
    }


# ---------------------------------------------------------------- command line
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The request comes on standard input."""


def main(arguments: argparse.Namespace) -> int:
    """Exit status: 0 scored, 2 refused."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            answer = score(_validated(ScoreRequest, json.load(sys.stdin)))
        status = 0
    except (json.JSONDecodeError, InvalidConfig, RewardError) as error:
        answer, status = {"problems": [asdict(problem) for problem in _problems(error)]}, 2
    print(json.dumps(answer))
    return status


def _validated(kind: type[Model], data: Any) -> Model:
    """Raises InvalidConfig with every fault of the data."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise InvalidConfig(problems_of(error, data)) from error


def _problems(error: Exception) -> list[Problem]:
    if isinstance(error, InvalidConfig):
        return error.problems
    if isinstance(error, RewardError):
        return [Problem("config.rewards", "", str(error), "correct the part, or leave it out")]
    return [Problem("", "", f"the request is not JSON: {error}", "write it as the module's docstring says")]
