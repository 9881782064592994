"""Prompts in order, without those that no completion could follow."""

from __future__ import annotations

from grpo_engine.errors import DataError
from grpo_engine.protocols import PromptSource
from grpo_engine.types import Prompt

MAX_DROPPED = 10_000
"""Positions in a row without a prompt that fits, after which a source is given up."""


def take_fitting(source: PromptSource, position: int, count: int) -> tuple[list[Prompt], int]:
    """The next `count` prompts from `position` on, and the position after them; prompts that the source drops count as
    positions only. Raises DataError when a whole epoch, or MAX_DROPPED positions, hold none that fits."""
    prompts: list[Prompt] = []
    # Each epoch has an order of its own: only so many positions surely hold a whole one.
    limit = min(2 * source.size - 1 if source.size else MAX_DROPPED, MAX_DROPPED)
    end, last_found = position, position
    while len(prompts) < count:
        missing = count - len(prompts)
        found = source.take(end, missing)
        end += missing
        prompts += found
        last_found = end if found else last_found
        if end - last_found >= limit:
            raise DataError(
                f"none of {end - last_found} prompts from position {last_found} on leaves room for a completion in the "
                "model's context; shorten them, or use a model with a longer context"
            )
    return prompts, end
