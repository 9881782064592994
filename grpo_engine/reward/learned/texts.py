"""Which question and which answer a learned part judges."""

from __future__ import annotations

from typing import Any

from grpo_engine.config_rewards import Extract
from grpo_engine.reward.extraction import Extraction, extract, opens_thinking
from grpo_engine.types import Completion, Prompt

QUESTION_COLUMNS = ("prompt", "question", "problem", "messages")


def question_of(prompt: Prompt) -> str:
    """The question as its dataset has it, where one of QUESTION_COLUMNS stands in what the policy read; else what the
    policy read, with its chat template's marks."""
    for name in QUESTION_COLUMNS:
        asked = _asked(prompt.columns.get(name))
        if asked and asked in prompt.text:
            return asked
    return prompt.text


def answer_of(method: Extract, prompt: Prompt, completion: Completion) -> Extraction:
    return extract(method, completion.text, thinking_opened=opens_thinking(prompt.text))


def well_formed(text: str) -> str:
    """Lone surrogates, which no encoding of text allows, as question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _asked(value: Any) -> str | None:
    """A text, or the last user message of a conversation."""
    if isinstance(value, list):
        said = [turn.get("content") for turn in value if isinstance(turn, dict) and turn.get("role") == "user"]
        value = said[-1] if said else None
    return value.strip() if isinstance(value, str) else None
