"""A stage's data: read, rendered, measured against the context. Torch-free."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from grpo_engine.checks.model_folder import ModelShape
from grpo_engine.checks.report import RenderedPrompt, Report, StageData
from grpo_engine.checks.tokenizer import LightTokenizer
from grpo_engine.config import FileData, RLStage, RunConfig, SFTStage
from grpo_engine.config_rollout import TorchRollout
from grpo_engine.data.sources import open_source
from grpo_engine.errors import DataError, InvalidConfig
from grpo_engine.protocols import PromptSource
from grpo_engine.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NUM_SHOWN = 3
MAX_FILE_ROWS = 1000
MAX_MADE_ROWS = 64
"""Rows looked at: of a file, and of a source that makes each one."""
Stage = SFTStage | RLStage


@dataclass(frozen=True, slots=True)
class ReadStage:
    """What was read of a stage."""

    prompts: list[Prompt]
    row_tokens: int
    """Longest prompt plus completion, as far as looked."""


def check_data(
    config: RunConfig, index: int, tokenizer: LightTokenizer, shape: ModelShape | None, report: Report
) -> ReadStage | None:
    """Read one stage's data into the report; None when it cannot be opened."""
    stage, field = config.stages[index], f"stages.{index}.data"
    try:
        source = open_source(
            stage.data, cast("PreTrainedTokenizerFast", tokenizer), seed=config.seed,
            demonstrations=isinstance(stage, SFTStage), field=field,
        )  # fmt: skip
        prompts = source.take(0, _num_looked_at(stage, source))
        held_out = source.held_out(stage.evaluation.num_prompts) if isinstance(stage, RLStage) else []
    except InvalidConfig as error:
        report.problems += error.problems
        return None
    except DataError as error:
        _refuse_data(stage, field, str(error), report)
        return None
    except ImportError as error:
        report.refuse(f"{field}.source", stage.data.source, f"needs a package: {error}", "install the engine extra")
        return None
    key, num_checked, num_held_out = config.stage_key(index), len(prompts), len(held_out)
    for prompt in prompts[:NUM_SHOWN]:
        report.prompts.append(_rendered(key, prompt))
    prompts, held_out = _without_too_long(config, index, prompts, held_out, shape, report)
    longest = max(len(prompt.token_ids) for prompt in [*prompts, *held_out])
    report.data.append(
        StageData(
            stage=key, source=stage.data.source, num_rows=source.size, num_held_out=num_held_out,
            num_checked=num_checked, longest_prompt_tokens=longest,
        )
    )  # fmt: skip
    _check_held_out(stage, index, num_held_out, report)
    _check_vocabulary(prompts, tokenizer, field, report)
    return ReadStage(prompts, _check_lengths(stage, index, [*prompts, *held_out], tokenizer, shape, report))


def _num_looked_at(stage: Stage, source: PromptSource) -> int:
    limit = MAX_FILE_ROWS if isinstance(stage.data, FileData) else MAX_MADE_ROWS
    return limit if source.size is None else min(source.size, limit)


def _rendered(key: str, prompt: Prompt) -> RenderedPrompt:
    answer = prompt.columns.get("answer")
    return RenderedPrompt(
        stage=key, id=prompt.id, text=prompt.text, num_tokens=len(prompt.token_ids),
        answer=None if answer is None else str(answer),
    )  # fmt: skip


def _refuse_data(stage: Stage, field: str, sentence: str, report: Report) -> None:
    """A DataError as a problem: its text names the setting, or the file is at fault; the remedy follows the last ;."""
    named = re.search(rf"{re.escape(field)}\.(\w+)", sentence)
    setting = {"file": "path", "reasoning_gym": "task", "addition": "source"}[stage.data.source]
    name = named.group(1) if named else setting
    message, _, remedy = sentence.rpartition("; ")
    report.refuse(
        f"{field}.{name}", getattr(stage.data, name, ""), message or remedy, remedy if message else "correct it"
    )


def _without_too_long(
    config: RunConfig, index: int, prompts: list[Prompt], held_out: list[Prompt], shape: ModelShape | None,
    report: Report,
) -> tuple[list[Prompt], list[Prompt]]:  # fmt: skip
    """The prompts that a run uses: reinforcement learning leaves those out that no completion could follow. Where none
    would be left, all stay, to be refused."""
    limits = [] if shape is None else [shape.max_context_tokens]
    if not isinstance(config.rollout, TorchRollout) and config.rollout.max_model_len is not None:
        limits.append(config.rollout.max_model_len)
    if not limits or not isinstance(config.stages[index], RLStage):
        return prompts, held_out
    limit = min(limits)
    fitting = [prompt for prompt in prompts if len(prompt.token_ids) < limit]
    if not fitting:
        return prompts, held_out
    kept = [prompt for prompt in held_out if len(prompt.token_ids) < limit]
    num_dropped = len(prompts) - len(fitting) + len(held_out) - len(kept)
    if num_dropped:
        longest = max([*prompts, *held_out], key=lambda prompt: len(prompt.token_ids))
        message = (
            f"{num_dropped} of {len(prompts) + len(held_out)} prompts leave no room in a context of {limit} tokens and "
            f"will be left out; the longest, {longest.id}, has {len(longest.token_ids)}"
        )
        report.warn(f"stages.{index}.data", longest.text, message, "shorten or remove them, or allow a longer context")
    return fitting, kept


def _check_held_out(stage: Stage, index: int, num_held_out: int, report: Report) -> None:
    if not isinstance(stage, RLStage) or num_held_out >= stage.evaluation.num_prompts:
        return
    field, wanted = f"stages.{index}.evaluation.num_prompts", stage.evaluation.num_prompts
    if num_held_out == 0:
        remedy = f"set stages.{index}.data.held_out_rows to keep rows for evaluation"
        report.warn(field, wanted, "nothing is held out, so the run has no evaluation", remedy)
        return
    message = f"only {num_held_out} prompts are held out, so evaluation uses {num_held_out} instead of {wanted}"
    report.warn(field, wanted, message, f"lower it to {num_held_out} or hold out more rows")


def _check_vocabulary(prompts: list[Prompt], tokenizer: LightTokenizer, field: str, report: Report) -> None:
    unknown = [prompt for prompt in prompts if tokenizer.unknown_share(prompt.token_ids) > 0]
    if unknown:
        first = unknown[0]
        share = tokenizer.unknown_share(first.token_ids)
        message = f"{len(unknown)} of {len(prompts)} prompts hold characters that the tokenizer does not know"
        remedy = f"the model cannot read {share:.0%} of prompt {first.id}; use another model or other data"
        report.warn(field, first.text, message, remedy)


def _check_lengths(
    stage: Stage, index: int, prompts: list[Prompt], tokenizer: LightTokenizer, shape: ModelShape | None, report: Report
) -> int:
    """Compare prompts (SFT: with their demonstrations) with the context; returns the longest row in tokens."""
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids) + _demonstration_tokens(stage, prompt, tokenizer))
    num_prompt = len(longest.token_ids)
    wanted = stage.sampling.max_new_tokens if isinstance(stage, RLStage) else 0
    row_tokens = num_prompt + wanted + _demonstration_tokens(stage, longest, tokenizer)
    if shape is None:
        return row_tokens
    limit, field = shape.max_context_tokens, f"stages.{index}.data"
    if num_prompt >= limit:
        message = f"prompt {longest.id} has {num_prompt} tokens, but the model's context is {limit}"
        report.refuse(field, longest.text, message, "shorten or remove it, or use a model with a longer context")
    elif isinstance(stage, SFTStage) and row_tokens > limit:
        message = f"prompt {longest.id} and its demonstration have {row_tokens} tokens; the model's context is {limit}"
        report.refuse(field, longest.text, message, "shorten or remove it, or use a model with a longer context")
    elif row_tokens > limit:
        message = f"prompt {longest.id} has {num_prompt} tokens, so the context of {limit} leaves {limit - num_prompt}"
        remedy = f"lower it to {limit - num_prompt}, or shorten the prompts; longer completions are cut"
        report.warn(f"stages.{index}.sampling.max_new_tokens", wanted, message, remedy)
    return min(row_tokens, limit)


def _demonstration_tokens(stage: Stage, prompt: Prompt, tokenizer: LightTokenizer) -> int:
    """Tokens of an SFT row's demonstration with its end token; 0 in other stages."""
    if not isinstance(stage, SFTStage):
        return 0
    return len(tokenizer(str(prompt.columns["completion"]), add_special_tokens=False).input_ids) + 1
