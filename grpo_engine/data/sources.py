"""Prompt sources: `open_source` makes the one that a config names. Torch-free.

Every source is stateless. A finite source is read in epochs: position p is row `permutation(epoch)[p % n]` of epoch
p // n, and the permutation follows from (seed, epoch) alone, so resuming needs the position and nothing else. A
procedural source derives the problem of position p from (seed, p).

The held-out part does not depend on the run's seed: all seeds of a study are measured on the same prompts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from grpo_engine.config import AdditionData, DataConfig, FileData
from grpo_engine.errors import DataError
from grpo_engine.streams import permutation
from grpo_engine.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from grpo_engine.protocols import PromptSource

RowNumbers = npt.NDArray[np.int64]

EVALUATION_SEED = 999
"""Seed of everything held out."""


def open_source(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int,
    demonstrations: bool = False,
    field: str = "data",
) -> PromptSource:
    """The source that `config` names.

    `demonstrations` demands a text in columns["completion"] of every prompt (SFT); `field` is the config's path in
    the run's config, for error messages. Raises DataError (missing or malformed rows) and InvalidConfig (task, options,
    chat template).
    """
    if isinstance(config, AdditionData):
        from grpo_engine.data.addition import Addition

        return Addition(config, tokenizer, seed=seed)
    if isinstance(config, FileData):
        from grpo_engine.data.files import open_file

        return open_file(config, tokenizer, seed=seed, demonstrations=demonstrations, field=field)
    from grpo_engine.data.gym import open_gym

    return open_gym(config, tokenizer, seed=seed, demonstrations=demonstrations, field=field)


def data_version(config: DataConfig) -> str:
    """Name and version of what gives the rows: the file's content, or the code or package that makes them.

    Example: data_version(AdditionData()) == "addition@5c1e88d0" (first 8 hex digits of SHA-256)."""
    if isinstance(config, FileData):
        with open(config.path, "rb") as file:
            return f"{Path(config.path).name}@{hashlib.file_digest(file, 'sha256').hexdigest()[:8]}"
    if isinstance(config, AdditionData):
        code = Path(__file__).with_name("addition.py").read_bytes()
        return f"addition@{hashlib.sha256(code).hexdigest()[:8]}"
    return f"{config.task}@reasoning-gym-{metadata.version('reasoning-gym')}"


class FiniteSource:
    """n training rows in a new order each epoch, and some held-out rows in a fixed one.

    `build(row, position)` makes the prompt of a row; `training` and `held` are disjoint row numbers.
    """

    def __init__(self, training: RowNumbers, held: RowNumbers, build: Callable[[int, int], Prompt], seed: int) -> None:
        self.size: int | None = len(training)
        self._training = training
        self._held = held
        self._build = build
        self._order = lru_cache(maxsize=2)(lambda epoch: permutation(len(training), "epoch", seed, epoch))

    def take(self, position: int, count: int) -> list[Prompt]:
        """Prompts at positions [position, position + count); crosses epochs as needed."""
        return [self._build(self.row_at(p), p) for p in range(position, position + count)]

    def row_at(self, position: int) -> int:
        """Row number at a position."""
        epoch, offset = divmod(position, len(self._training))
        return int(self._training[self._order(epoch)[offset]])

    def held_out(self, count: int) -> list[Prompt]:
        """The first `count` held-out prompts; fewer when there are fewer, none when nothing is held out."""
        return [self._build(int(row), index) for index, row in enumerate(self._held[:count])]


def check_prompt_lengths(prompts: Iterable[Prompt], max_context_tokens: int) -> None:
    """DataError when a prompt is empty or leaves no room for one token; names id, length and limit."""
    for prompt in prompts:
        length = len(prompt.token_ids)
        if length == 0:
            raise DataError(f"prompt {prompt.id} has no tokens; give it a text or a chat template")
        if length > max_context_tokens - 1:
            raise DataError(
                f"prompt {prompt.id} has {length} tokens; the model's context of {max_context_tokens} leaves room for"
                f" {max_context_tokens - 1}; shorten or remove it, or use a model with a longer context"
            )


class WithinContext:
    """A source whose prompts are held against the model's context as they are taken.

    With `drop` those that are too long are left out, so that `take` may give fewer; else they are an error."""

    def __init__(self, source: PromptSource, max_context_tokens: int, *, drop: bool = False) -> None:
        self.size = source.size
        self._source = source
        self._max_context_tokens = max_context_tokens
        self._drop = drop

    def take(self, position: int, count: int) -> list[Prompt]:
        """Raises DataError naming a prompt that is empty, or leaves no room for one token and is not dropped."""
        return self._checked(self._source.take(position, count))

    def held_out(self, count: int) -> list[Prompt]:
        """Raises DataError as `take` does."""
        return self._checked(self._source.held_out(count))

    def _checked(self, prompts: list[Prompt]) -> list[Prompt]:
        if self._drop:
            prompts = [prompt for prompt in prompts if len(prompt.token_ids) < self._max_context_tokens]
        check_prompt_lengths(prompts, self._max_context_tokens)
        return prompts
