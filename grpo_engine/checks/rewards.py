"""A stage's rewards: loaded, and called on completions that hold the gold answer. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import closing

from grpo_engine.checks.prompts import ReadStage
from grpo_engine.checks.report import GoldReward, Report
from grpo_engine.checks.reward_needs import check_columns, check_models
from grpo_engine.checks.tokenizer import LightTokenizer
from grpo_engine.config import (
    AccuracyReward,
    BertScoreReward,
    CodeExecutionReward,
    CustomReward,
    GymReward,
    JudgeReward,
    LengthReward,
    RewardModelReward,
    RLStage,
    part_names,
)
from grpo_engine.errors import RewardError
from grpo_engine.protocols import RewardFunction
from grpo_engine.reward.accuracy import gold_text
from grpo_engine.reward.composite import Composite, build_rewards
from grpo_engine.reward.resources import RewardResources
from grpo_engine.types import Completion, Prompt, RewardPart

NUM_GOLD = 3
UNCALLED = (CodeExecutionReward, BertScoreReward, RewardModelReward, JudgeReward)
"""Parts that are not called here: they need the sandbox, a model or money."""


def check_rewards(
    stage: RLStage,
    index: int,
    read: ReadStage | None,
    tokenizer: LightTokenizer | None,
    sources: Mapping[str, str],
    uncalled: Collection[str],
    report: Report,
) -> None:
    """Problems and gold rewards of one stage. `uncalled`: custom rewards that exist, but may not be called here."""
    prompts = read.prompts if read else []
    _check_gold(stage, index, prompts, report)
    check_columns(stage, index, prompts, report)
    check_models(stage, index, report)
    _check_length_limits(stage, index, report)
    with_gold = [prompt for prompt in prompts if gold_text(prompt.columns.get("answer")) is not None][:NUM_GOLD]
    for number, name in enumerate(part_names(stage.rewards)):
        if isinstance(stage.rewards[number], UNCALLED):
            continue
        part = _load(stage, index, number, sources, uncalled, report)
        if part is None:
            continue
        with closing(part):
            [function] = part.functions
            function.name = name
            if with_gold and tokenizer:
                completions = [_gold_completion(stage, number, prompt, tokenizer) for prompt in with_gold]
                _call(stage, index, number, function, with_gold, completions, report)


def _check_gold(stage: RLStage, index: int, prompts: Sequence[Prompt], report: Report) -> None:
    """Accuracy needs a gold answer in every row."""
    if not any(isinstance(part, AccuracyReward) for part in stage.rewards):
        return
    without = [prompt for prompt in prompts if gold_text(prompt.columns.get("answer")) is None]
    if without:
        field = f"stages.{index}.data." + ("answer_column" if stage.data.source == "file" else "source")
        value = getattr(stage.data, "answer_column", stage.data.source)
        message = (
            f"{len(without)} of {len(prompts)} rows have no gold answer ({without[0].id} first); accuracy needs one"
        )
        report.refuse(field, value, message, "name the column with the answers, or use another reward than accuracy")


def _check_length_limits(stage: RLStage, index: int, report: Report) -> None:
    limit = stage.sampling.max_new_tokens
    for number, part in enumerate(stage.rewards):
        if isinstance(part, LengthReward) and part.max_tokens - part.buffer_tokens >= limit:
            field = f"stages.{index}.rewards.{number}.max_tokens"
            begin = part.max_tokens - part.buffer_tokens
            message = f"the penalty begins after {begin} tokens, but completions end at {limit}"
            report.warn(field, part.max_tokens, message, f"set max_tokens to sampling.max_new_tokens = {limit}")


def _load(
    stage: RLStage, index: int, number: int, sources: Mapping[str, str], uncalled: Collection[str], report: Report
) -> Composite | None:
    """The part alone, judging in this process."""
    part = stage.rewards[number]
    field = f"stages.{index}.rewards.{number}.name"
    if isinstance(part, CustomReward) and part.name not in sources:
        if part.name in uncalled:
            report.warn(field, part.name, "was not called here", "check it with a user who has the code permission")
        else:
            remedy = f"register it, or pass --reward {part.name}=FILE"
            report.refuse(field, part.name, "no reward of this name has a source", remedy)
        return None
    try:
        resources = RewardResources(sources, num_processes=0)
        return build_rewards(stage.model_copy(update={"rewards": [part]}), resources)
    except RewardError as error:
        report.refuse(field, getattr(part, "name", part.kind), str(error), "correct the source")
        return None


def _call(
    stage: RLStage,
    index: int,
    number: int,
    function: RewardFunction,
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    report: Report,
) -> None:
    parts = function.score(prompts, completions)
    for prompt, completion, part in zip(prompts, completions, parts, strict=True):
        report.gold_rewards.append(
            GoldReward(
                stage=f"{index}-rl", part=function.name, prompt_id=prompt.id, completion=completion.text,
                value=part.value, explanation=part.explanation,
            )
        )  # fmt: skip
    _judge_gold(stage, index, number, parts, prompts, report)


def _judge_gold(
    stage: RLStage, index: int, number: int, parts: Sequence[RewardPart], prompts: Sequence[Prompt], report: Report
) -> None:
    part, field = stage.rewards[number], f"stages.{index}.rewards.{number}"
    if isinstance(part, AccuracyReward | GymReward):
        for result, prompt in zip(parts, prompts, strict=True):
            unreadable = result.value is None and isinstance(part, AccuracyReward)  # told with all rows of its kind
            if not unreadable and (result.value is None or result.value < 1):
                message = f"the gold answer of {prompt.id} gets {result.value}, not 1: {result.explanation}"
                report.refuse(f"{field}.extract", part.extract, message, "use an extraction that fits the gold answers")
                return
    elif isinstance(part, CustomReward) and all(result.value is None for result in parts):
        message = f"it abstains on every gold answer: {parts[0].explanation}"
        report.refuse(f"{field}.name", part.name, message, "correct the source")


def _gold_completion(stage: RLStage, number: int, prompt: Prompt, tokenizer: LightTokenizer) -> Completion:
    """A completion that ought to be right, written as the part (or the stage's first such part) reads it."""
    gold = gold_text(prompt.columns["answer"]) or ""
    extracts = [part.extract for part in [stage.rewards[number], *stage.rewards] if hasattr(part, "extract")]
    extract = extracts[0] if extracts else "after_think"
    if stage.rewards[number].kind == "format":
        extract = "after_think"
    text = {"after_think": f"<think></think>{gold}", "boxed": f"\\boxed{{{gold}}}"}.get(extract, gold)
    token_ids = tokenizer(text, add_special_tokens=False).input_ids
    return Completion(token_ids, text, "stop", [0.0] * len(token_ids), [0.0] * len(token_ids))
