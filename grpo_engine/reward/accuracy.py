"""Accuracy: 1 when the extracted answer equals the gold answer, else 0."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from grpo_engine.reward import extraction
from grpo_engine.reward.versions import module_source, version_of
from grpo_engine.types import Completion, Prompt, RewardPart

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?(?:[eE][-+]?\d{1,4})?|[-+]?\.\d+(?:[eE][-+]?\d{1,4})?")
_SHOWN_CHARACTERS = 80


@dataclass
class Accuracy:
    """Compares what `extract` finds with the prompt's column `answer`; abstains where there is no gold answer."""

    weight: float
    extract: extraction.Method
    name: str = "accuracy"
    version: str = field(default_factory=lambda: version_of("accuracy", module_source(__file__, extraction.__file__)))

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[RewardPart]:
        return [self._judge(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]

    def _judge(self, prompt: Prompt, completion: Completion) -> RewardPart:
        gold = gold_text(prompt.columns.get("answer"))
        if gold is None:
            return self._part(None, "The prompt has no gold answer, so nothing can be compared.")
        opened = extraction.opens_thinking(prompt.text)
        found = extraction.extract(self.extract, completion.text, thinking_opened=opened)
        if found.text is None:
            return self._part(0.0, f"{found.reason}, so there is no answer.")
        equal = answers_equal(found.text, gold)
        sign = "equals" if equal else "differs from"
        return self._part(float(equal), f"{shorten(found.text)} {sign} the gold answer {shorten(gold)}.", found.span)

    def _part(self, value: float | None, explanation: str, span: tuple[int, int] | None = None) -> RewardPart:
        return RewardPart(self.name, value, self.weight, explanation, span, self.version)


def gold_text(answer: Any) -> str | None:
    """The gold answer as text; None when there is none or it is neither text nor a number."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return None
    return str(answer).strip() or None


def answers_equal(answer: str, gold: str) -> bool:
    """Equal text after stripping, or equal numbers.

    Numbers are integers and decimals, compared exactly and without tolerance: 632 = 632.0 = +632 = 0632, and
    1,234 = 1234. Case, units, fractions and formulas count as text.
    """
    answer, gold = answer.strip(), gold.strip()
    if answer == gold:
        return True
    number = _as_number(answer)
    return number is not None and number == _as_number(gold)


def _as_number(text: str) -> Decimal | None:
    text = text.replace("\u2212", "-")
    return Decimal(text.replace(",", "")) if _NUMBER.fullmatch(text) else None


def shorten(text: str) -> str:
    """Text for a sentence: one line, at most 80 characters."""
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARACTERS else line[: _SHOWN_CHARACTERS - 1] + "…"
