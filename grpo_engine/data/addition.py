"""Procedural addition: `347+285=` with the answer 632 and a demonstration that reasons or answers at once.

A tenth of all problems, those whose text's CRC-32 is a multiple of 10, is held out and never trained on.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, NamedTuple

from grpo_engine.config import AdditionData
from grpo_engine.data.sources import EVALUATION_SEED
from grpo_engine.streams import raw_stream
from grpo_engine.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TRIES_PER_PROBLEM = 100
"""Draws for one held-out problem before the space counts as exhausted; one digit has only about ten of them."""


def is_held_out(text: str) -> bool:
    """True for a tenth of all problems.

    Example: is_held_out("347+285=")
    """
    return zlib.crc32(text.encode()) % 10 == 0


def reasoning(left: int, right: int, num_digits: int) -> str:
    """The sum digit by digit, lowest first, with the carry as third summand.

    Example: reasoning(347, 285, 3) == "7+5=12;4+8+1=13;3+2+1=6"
    """
    parts = []
    carry = 0
    for place in range(num_digits):
        a, b = left // 10**place % 10, right // 10**place % 10
        total = a + b + carry
        parts.append(f"{a}+{b}+{carry}={total}" if place else f"{a}+{b}={total}")
        carry = total // 10
    return ";".join(parts)


class Addition:
    """An endless PromptSource; the problem at a position follows from (seed, position)."""

    size: int | None = None

    def __init__(self, config: AdditionData, tokenizer: PreTrainedTokenizerFast, *, seed: int) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._seed = seed

    def take(self, position: int, count: int) -> list[Prompt]:
        """Problems of the training part; a held-out draw is replaced by the next draw of the same position."""
        return [self._training_prompt(p) for p in range(position, position + count)]

    def held_out(self, count: int) -> list[Prompt]:
        """The first `count` different held-out problems, the same for every seed; fewer when the space has fewer."""
        found: dict[str, _Problem] = {}
        for draw in range(count * TRIES_PER_PROBLEM):
            if len(found) == count:
                break
            problem = self._draw(EVALUATION_SEED, 0, draw)
            if is_held_out(problem.text):
                found.setdefault(problem.text, problem)
        return [self._prompt(problem, index) for index, problem in enumerate(found.values())]

    def _training_prompt(self, position: int) -> Prompt:
        draw = 0
        while is_held_out((problem := self._draw(self._seed, position, draw)).text):
            draw += 1
        return self._prompt(problem, position)

    def _draw(self, seed: int, position: int, draw: int) -> _Problem:
        digits = self._config.num_digits
        lowest = 10 ** (digits - 1) if digits > 1 else 0
        span = 10**digits - lowest
        a, b, style = (int(number) for number in raw_stream(3, "addition", seed, position, draw))
        return _Problem(lowest + a % span, lowest + b % span, (style >> 11) * 2.0**-53 < self._config.think_share)

    def _prompt(self, problem: _Problem, position: int) -> Prompt:
        left, right, thinks = problem
        thoughts = reasoning(left, right, self._config.num_digits) if thinks else ""
        answer = str(left + right)
        return Prompt(
            id=f"addition/{left}+{right}",
            position=position,
            text=problem.text,
            token_ids=list(self._tokenizer(problem.text, add_special_tokens=False).input_ids),
            columns={"answer": answer, "completion": f"<think>{thoughts}</think>{answer}"},
        )


class _Problem(NamedTuple):
    left: int
    right: int
    thinks: bool
    """Whether its demonstration reasons."""

    @property
    def text(self) -> str:
        return f"{self.left}+{self.right}="
