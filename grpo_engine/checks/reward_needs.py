"""What reward parts need beside their config: columns of the dataset that can be judged by, model folders, keys."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo_engine.checks.report import Report
from grpo_engine.config import (
    AccuracyReward,
    BertScoreReward,
    CodeExecutionReward,
    InstructionFollowingReward,
    JudgeReward,
    LanguageConsistencyReward,
    RewardConfig,
    RewardModelReward,
    RLStage,
    RunConfig,
)
from grpo_engine.types import Prompt

Fault = Callable[[Prompt], str | None]
"""What keeps a prompt's columns from being judged by, as a sentence; None when nothing does."""


def check_columns(stage: RLStage, index: int, prompts: Sequence[Prompt], report: Report) -> None:
    """A row that a part could never judge is an error of the dataset, and refused before it trains anything."""
    for number, part in enumerate(stage.rewards):
        fault_of = _fault_finder(part)
        if fault_of is None:
            continue
        faults = [(prompt, fault) for prompt in prompts if (fault := fault_of(prompt)) is not None]
        if faults:
            first, fault = faults[0]
            message = f"{len(faults)} of {len(prompts)} rows cannot be judged; {first.id}: {fault}"
            field = f"stages.{index}.rewards.{number}.kind"
            report.refuse(field, part.kind, message, "correct these rows, or leave the part out")


def _fault_finder(part: RewardConfig) -> Fault | None:
    """The metrics' own checks, imported when asked for: each brings libraries that most configs do not need."""
    match part:
        case AccuracyReward():
            from grpo_engine.reward.accuracy import gold_problem

            return lambda prompt: None if _lacks(prompt, "answer") else gold_problem(_answer(prompt), part.compare)
        case CodeExecutionReward():
            from grpo_engine.reward.program_cases import cases_problem

            return lambda prompt: cases_problem(prompt.columns, part.cases)
        case LanguageConsistencyReward():
            from grpo_engine.reward.language_consistency import language_problem

            return lambda prompt: language_problem(prompt.columns.get("language") or part.language)
        case InstructionFollowingReward():
            from grpo_engine.reward.instruction_following import constraint_problem

            return lambda prompt: constraint_problem(prompt.columns)
        case BertScoreReward():
            return lambda prompt: f"column {part.column} holds no text" if _lacks(prompt, part.column) else None
    return None


def _answer(prompt: Prompt) -> Any:
    return prompt.columns.get("answer")


def _lacks(prompt: Prompt, column: str) -> bool:
    return prompt.columns.get(column) in (None, "")


# ---------------------------------------------------------------- models and judges
def check_models(stage: RLStage, index: int, report: Report) -> None:
    for number, part in enumerate(stage.rewards):
        field = f"stages.{index}.rewards.{number}"
        if isinstance(part, BertScoreReward | RewardModelReward):
            _check_folder(f"{field}.model", part.model, report)
            if isinstance(part, RewardModelReward):
                _check_head(f"{field}.model", part.model, report)
        elif isinstance(part, JudgeReward) and part.api_key_variable and part.api_key_variable not in os.environ:
            message = "this environment variable is not set here; the judge would be asked without a key"
            remedy = "set it where workers run, or leave it out for a judge that wants no key"
            report.warn(f"{field}.api_key_variable", part.api_key_variable, message, remedy)


def check_sandbox(config: RunConfig, report: Report) -> None:
    """Whether this host looks as if it could run programs; the worker tries it with real attacks."""
    parts = [part for stage in config.stages if isinstance(stage, RLStage) for part in stage.rewards]
    if not any(isinstance(part, CodeExecutionReward) for part in parts):
        return
    from grpo_engine.reward.sandbox.tiers import TIERS, obstacle

    tier = config.sandbox.tier
    if tier == "unsafe":
        message = "no file is guarded: programs that the model writes can read and change what the worker can"
        report.warn("sandbox.tier", tier, message, "set it to auto where the host allows it")
        return
    found = {name: obstacle(name) for name in TIERS if tier in ("auto", name)}
    if all(found.values()):
        message = f"this host cannot confine programs: {'; '.join(f'{name}: {why}' for name, why in found.items())}"
        report.warn("sandbox.tier", tier, message, "install bubblewrap, or start a worker on a host with Landlock")


def _check_folder(field: str, model: str, report: Report) -> None:
    folder = Path(model)
    if not folder.is_dir():
        report.refuse(field, model, "the folder does not exist", "give the folder of a model")
    elif not (folder / "config.json").is_file():
        report.refuse(field, model, "the folder has no config.json", "give a folder that transformers can load")


def _check_head(field: str, model: str, report: Report) -> None:
    """A language model would load with a scoring head of random numbers."""
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        kinds = [str(kind) for kind in config.get("architectures") or []]
    except (OSError, ValueError, AttributeError):
        return  # a folder without a config is told already, and one that cannot be read fails when it is loaded
    if kinds and not any(kind.endswith("ForSequenceClassification") for kind in kinds):
        message = f"the folder holds a {kinds[0]}, which has no head that scores"
        report.refuse(field, model, message, "give a sequence-classification checkpoint")
