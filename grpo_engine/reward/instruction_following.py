"""Instruction following: the share of a prompt's verifiable constraints that the completion keeps."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import Any

from grpo_engine.config_rewards import InstructionFollowingReward
from grpo_engine.reward import constraint_checks, constraints, extraction, json_schemas, language_consistency, phrases
from grpo_engine.reward.constraint_checks import check
from grpo_engine.reward.constraints import Constraint, read_constraints
from grpo_engine.reward.metric import Judgement, Metric
from grpo_engine.reward.prose import capped
from grpo_engine.reward.versions import module_source, version_of
from grpo_engine.types import Completion, Prompt

_SHOWN = 5


def metric(config: InstructionFollowingReward) -> Metric:
    """Judges what `extract` finds. The prompt's column `constraints` is a list of objects such as
    {"kind": "word_count", "at_most": 50}; the kinds and their fields are the classes of reward/constraints.py."""

    def judge(prompt: Prompt, completion: Completion) -> Judgement:
        column = prompt.columns.get("constraints")
        if not column:
            return Judgement(None, "The prompt has no constraints.")
        wanted = read_constraints(column)
        if isinstance(wanted, str):
            return Judgement(None, wanted)
        opened = extraction.opens_thinking(prompt.text)
        found = extraction.extract(config.extract, completion.text, thinking_opened=opened)
        if found.text is None:
            return Judgement(0.0, f"{found.reason}, so nothing keeps the constraints.")
        text, note = capped(found.text)
        said = _judge(config, wanted, text, len(completion.token_ids))
        return Judgement(said.value, said.explanation + note, found.span)

    return Metric(config.kind, config.weight, _version(), judge)


def _version() -> str:
    modules = (constraints, constraint_checks, json_schemas, extraction, phrases)
    files = [str(module.__file__) for module in modules]
    languages = language_consistency.version()
    return version_of(
        "instruction_following",
        module_source(__file__, *files),
        languages.encode(),
        metadata.version("jsonschema").encode(),
    )


def constraint_problem(columns: Mapping[str, Any]) -> str | None:
    """What is wrong with the prompt's constraints, as a sentence; None when nothing is, or when it has none."""
    column = columns.get("constraints")
    read = read_constraints(column) if column else []
    return read if isinstance(read, str) else None


def _judge(config: InstructionFollowingReward, wanted: list[Constraint], text: str, num_tokens: int) -> Judgement:
    checked = [(constraint.kind, check(constraint, text, num_tokens)) for constraint in wanted]
    judged = [(kind, said) for kind, said in checked if said.kept is not None]
    open_ = [f"{kind} ({said.found})" for kind, said in checked if said.kept is None]
    unjudged = f" Not judged: {', '.join(open_[:_SHOWN])}." if open_ else ""
    if not judged:
        return Judgement(None, f"No constraint can be judged.{unjudged}")
    broken = [f"{kind} ({said.found})" for kind, said in judged if not said.kept]
    share = 1.0 - len(broken) / len(judged)
    value = share if config.credit == "share" else float(not broken)
    names = f" Not kept: {', '.join(broken[:_SHOWN])}{', …' if len(broken) > _SHOWN else ''}." if broken else ""
    return Judgement(value, f"{len(judged) - len(broken)} of {len(judged)} constraints are kept.{names}{unjudged}")
