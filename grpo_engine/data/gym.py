"""Tasks of the package reasoning-gym as prompts. Torch-free.

Items are numbered 0 … size - 1 and do not depend on the run's seed (which only orders them). The last tenth is held
out. Small tasks repeat questions, so a training position whose question also occurs in the held-out part takes the
next item that does not. For this the first read generates the whole held-out tenth: milliseconds for most tasks, but
minutes for the few that need a tenth of a second an item (futoshiki, knight_swap); give them a smaller `size`.
"""

from __future__ import annotations

import difflib
from dataclasses import fields
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_engine.config import ReasoningGymData
from grpo_engine.data.rendering import Renderer, json_value
from grpo_engine.data.sources import EVALUATION_SEED, FiniteSource
from grpo_engine.errors import DataError, InvalidConfig, Problem
from grpo_engine.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

RESERVED_OPTIONS = ("seed", "size")


def open_gym(
    config: ReasoningGymData, tokenizer: PreTrainedTokenizerFast, *, seed: int, demonstrations: bool, field: str
) -> GymSource:
    """The task as a source; columns are task, index, question, answer and metadata."""
    if demonstrations:
        raise DataError(
            f"{field}.source = reasoning_gym has no demonstrations for SFT; use a file with completions or addition"
        )
    renderer = Renderer(tokenizer, system_prompt=config.system_prompt, chat_template=config.chat_template, field=field)
    return GymSource(config, create_task(config, field=field), renderer, seed)


def create_task(config: ReasoningGymData, *, field: str = "data") -> Any:
    """The package's dataset. InvalidConfig for an unknown task or options that it refuses."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if config.task not in DATASETS:
        close = difflib.get_close_matches(config.task, DATASETS, n=3, cutoff=0.5)
        remedy = f"did you mean {', '.join(close)}?" if close else f"use one of {', '.join(sorted(DATASETS))}"
        raise InvalidConfig([Problem(f"{field}.task", config.task, "reasoning-gym has no such task", remedy)])
    known = sorted({option.name for option in fields(DATASETS[config.task][1])} - set(RESERVED_OPTIONS))
    message, remedy = f"{config.task} has no such option", f"use {', '.join(known)}"
    problems = [
        Problem(f"{field}.options.{name}", str(value)[:200], message, remedy)
        for name, value in config.options.items()
        if name not in known
    ]
    if problems:
        raise InvalidConfig(problems)
    try:
        return reasoning_gym.create_dataset(config.task, size=config.size, seed=EVALUATION_SEED, **config.options)
    except Exception as error:  # the package checks options with assert and whatever its tasks raise
        message = f"{config.task} refuses its options: {error}"
        raise InvalidConfig(
            [Problem(f"{field}.options", str(config.options)[:200], message, "change the options")]
        ) from error


class GymSource(FiniteSource):
    """Finite source over a task's items, generated when they are asked for."""

    def __init__(self, config: ReasoningGymData, dataset: Any, renderer: Renderer, seed: int) -> None:
        self._config = config
        self._dataset = dataset
        self._renderer = renderer
        self._item = lru_cache(maxsize=4096)(dataset.__getitem__)
        self._num_training = config.size - max(1, config.size // 10)
        held = np.arange(self._num_training, config.size)
        super().__init__(np.arange(self._num_training), held, self._build_prompt, seed)

    def row_at(self, position: int) -> int:
        """Item number at a position; items that repeat a held-out question are passed over."""
        first = super().row_at(position)
        for step in range(self._num_training):
            row = (first + step) % self._num_training
            if self._item(row)["question"] not in self._held_questions:
                return row
        raise DataError(
            f"all {self._num_training} training items of {self._config.task} also occur in the held-out tenth;"
            " the task has too few different questions: widen its options"
        )

    @cached_property
    def _held_questions(self) -> frozenset[str]:
        return frozenset(self._item(row)["question"] for row in range(self._num_training, self._config.size))

    def _build_prompt(self, row: int, position: int) -> Prompt:
        item = self._item(row)
        task = self._config.task
        text, token_ids = self._renderer(item["question"], f"reasoning-gym {task}, item {row}")
        columns = {
            "task": task,
            "index": row,
            "question": item["question"],
            "answer": None if item["answer"] is None else str(item["answer"]),
            "metadata": json_value(item["metadata"]),
        }
        return Prompt(f"gym/{task}/{row}", position, text, token_ids, columns)
