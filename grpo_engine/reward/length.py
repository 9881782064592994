"""Length: DAPO's soft overlong penalty (Yu et al. 2025, equation 13), in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from grpo_engine.reward.versions import module_source, version_of
from grpo_engine.types import Completion, Prompt, RewardPart


@dataclass
class Length:
    """0 up to max_tokens - buffer_tokens, falling linearly to -1 at max_tokens, -1 beyond. The end token counts."""

    weight: float
    max_tokens: int
    buffer_tokens: int
    name: str = "length"
    version: str = field(default_factory=lambda: version_of("length", module_source(__file__)))

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[RewardPart]:
        return [self._judge(len(completion.token_ids)) for completion in completions]

    def _judge(self, num_tokens: int) -> RewardPart:
        free = self.max_tokens - self.buffer_tokens
        if num_tokens <= free:
            explanation = f"{num_tokens} tokens, free up to {free}."
        else:
            explanation = f"{num_tokens} tokens, {num_tokens - free} over the {free} that are free."
        value = overlong_penalty(num_tokens, self.max_tokens, self.buffer_tokens)
        return RewardPart(self.name, value, self.weight, explanation, None, self.version)


def overlong_penalty(num_tokens: int, max_tokens: int, buffer_tokens: int) -> float:
    """Example: overlong_penalty(90, 100, 20) == -0.5."""
    over = num_tokens - (max_tokens - buffer_tokens)
    return max(-1.0, -over / buffer_tokens) if over > 0 else 0.0
