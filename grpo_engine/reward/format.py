"""Format: 1 when the completion has exactly the asked structure of tags, else 0."""

from __future__ import annotations

import re
from typing import Literal

from grpo_engine.config_rewards import FormatReward
from grpo_engine.reward import extraction
from grpo_engine.reward.extraction import CLOSE_TAG, OPEN_TAG
from grpo_engine.reward.metric import Judgement, Metric
from grpo_engine.reward.versions import module_source, version_of
from grpo_engine.types import Completion, Prompt

Structure = Literal["think", "think_answer"]

OPEN_ANSWER, CLOSE_ANSWER = "<answer>", "</answer>"
_TAGS: dict[Structure, tuple[str, ...]] = {
    "think": (OPEN_TAG, CLOSE_TAG),
    "think_answer": (OPEN_TAG, CLOSE_TAG, OPEN_ANSWER, CLOSE_ANSWER),
}
_WELL_FORMED: dict[Structure, str] = {
    "think": "The completion is <think>…</think> followed by an answer.",
    "think_answer": "The completion is <think>…</think><answer>…</answer> and nothing else.",
}
# Special tokens that decoding kept.
_SPECIAL = r"<\|[^<>\s]{1,40}\|>|</?(?:s|pad|bos|eos|unk)>"
# Tags in other spellings, and special tokens.
_STRAY: dict[Structure, re.Pattern[str]] = {
    "think": re.compile(rf"<\s*/?\s*think\w*\s*/?\s*>|{_SPECIAL}", re.IGNORECASE),
    "think_answer": re.compile(rf"<\s*/?\s*(?:think|answer)\w*\s*/?\s*>|{_SPECIAL}", re.IGNORECASE),
}


def metric(config: FormatReward) -> Metric:
    """Judges the whole completion. When the prompt itself ends with <think>, the completion starts inside it and must
    not open it again."""

    def judge(prompt: Prompt, completion: Completion) -> Judgement:
        text = completion.text
        lent = OPEN_TAG if extraction.opens_thinking(prompt.text) else ""
        fault = find_fault(lent + text, config.structure, allow_empty_thinking=config.allow_empty_thinking)
        return Judgement(float(not fault), f"{fault}." if fault else _WELL_FORMED[config.structure], (0, len(text)))

    return Metric(config.kind, config.weight, _version(), judge)


def _version() -> str:
    return version_of("format", module_source(__file__, extraction.__file__))


def find_fault(text: str, structure: Structure = "think", *, allow_empty_thinking: bool = True) -> str:
    """What keeps `text` from having the structure, without full stop; empty when nothing does.

    Plain string search, no pattern over lines: with re.MULTILINE a `$` would accept any text after the first line.
    White space around the whole, around the answer and between the two blocks is allowed; invisible characters that
    are no white space are text where none may stand, and no content where some must.
    """
    tags = _TAGS[structure]
    between, fault = _split(text, tags)
    if fault:
        return fault
    thinking, answer = between[1], between[2] if structure == "think" else between[3]
    stray = _first(_STRAY[structure], thinking, answer)
    if stray:
        return f"The stray tag {stray} stands in it"
    if not allow_empty_thinking and not _has_content(thinking):
        return f"Nothing stands between {OPEN_TAG} and {CLOSE_TAG}"
    if structure == "think":
        return "" if _has_content(answer) else f"Nothing follows {CLOSE_TAG}"
    if between[2].strip():
        return f"Text stands between {CLOSE_TAG} and {OPEN_ANSWER}"
    if between[4].strip():
        return f"Text stands after {CLOSE_ANSWER}"
    return "" if _has_content(answer) else f"Nothing stands between {OPEN_ANSWER} and {CLOSE_ANSWER}"


def _split(text: str, tags: tuple[str, ...]) -> tuple[list[str], str]:
    """The texts before, between and after the tags, and what is wrong with the tags themselves."""
    for tag in tags:
        if (count := text.count(tag)) != 1:
            return [], f"{tag} must stand once, not {count} times"
    between, rest = [], text
    for earlier, tag in zip(("", *tags), tags, strict=False):
        before, found, rest = rest.partition(tag)
        if not found:
            return [], f"{tag} comes before {earlier}"
        between.append(before)
    if between[0].strip():
        return [], f"Text stands before {OPEN_TAG}"
    return [*between, rest], ""


def _first(pattern: re.Pattern[str], *texts: str) -> str:
    found = next((match for text in texts if (match := pattern.search(text))), None)
    return found.group() if found else ""


def _has_content(text: str) -> bool:
    """Whether a reader would see something: NUL bytes, zero-width and direction marks are no content."""
    return any(character.isprintable() and not character.isspace() for character in text)
