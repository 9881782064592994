"""Format: 1 when the completion is exactly <think>…</think>answer, else 0."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from grpo_engine.reward import extraction
from grpo_engine.reward.extraction import CLOSE_TAG, OPEN_TAG
from grpo_engine.reward.versions import module_source, version_of
from grpo_engine.types import Completion, Prompt, RewardPart

# Think tags in other spellings, and special tokens that decoding kept.
_STRAY = re.compile(r"<\s*/?\s*think\w*\s*/?\s*>|<\|[^<>\s]{1,40}\|>|</?(?:s|pad|bos|eos|unk)>", re.IGNORECASE)


@dataclass
class Format:
    """Tags once and in order, nothing before them, an answer after them. Empty thinking is allowed.

    When the prompt itself ends with <think>, the completion starts inside it and must not open it again.
    """

    weight: float
    name: str = "format"
    version: str = field(default_factory=lambda: version_of("format", module_source(__file__, extraction.__file__)))

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[RewardPart]:
        return [self._judge(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]

    def _judge(self, prompt: Prompt, completion: Completion) -> RewardPart:
        text = completion.text
        fault = find_fault(OPEN_TAG + text if extraction.opens_thinking(prompt.text) else text)
        explanation = f"{fault}." if fault else "The completion is <think>…</think> followed by an answer."
        return RewardPart(self.name, float(not fault), self.weight, explanation, (0, len(text)), self.version)


def find_fault(text: str) -> str:
    """What keeps `text` from being <think>…</think>answer, without full stop; empty when nothing does.

    Plain string search, no pattern over lines: with re.MULTILINE a `$` would accept any text after the first line.
    White space around the whole and around the answer is allowed.
    """
    for tag in (OPEN_TAG, CLOSE_TAG):
        if text.count(tag) != 1:
            return f"{tag} must stand once, not {text.count(tag)} times"
    before, _, rest = text.partition(OPEN_TAG)
    if CLOSE_TAG not in rest:
        return f"{CLOSE_TAG} comes before {OPEN_TAG}"
    if before.strip():
        return f"Text stands before {OPEN_TAG}"
    thinking, _, answer = rest.partition(CLOSE_TAG)
    stray = _STRAY.search(thinking) or _STRAY.search(answer)
    if stray:
        return f"The stray tag {stray.group()} stands in it"
    return "" if answer.strip() else f"Nothing follows {CLOSE_TAG}"
