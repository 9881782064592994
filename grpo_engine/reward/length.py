"""Length: how well the number of tokens fits, by DAPO's soft overlong punishment or by cosine shaping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_engine.config_rewards import LengthReward
from grpo_engine.reward.metric import Judgement, Metric
from grpo_engine.reward.versions import module_source, version_of
from grpo_engine.types import Completion, Prompt, RewardPart


def metric(config: LengthReward) -> Metric | Cosine:
    """Counts the sampled tokens, the end token included; the text is not looked at.

    Cosine shaping asks whether the answer is right: see `Cosine`. Both shapes lie in [0, 1].
    """
    version = version_of("length", module_source(__file__))
    if config.shape == "cosine":
        return Cosine(config, config.kind, config.weight, version)

    def judge(_: Prompt, completion: Completion) -> Judgement:
        return _judge_overlong(config, len(completion.token_ids))

    return Metric(config.kind, config.weight, version, judge)


@dataclass
class Cosine:
    """Cosine shaping, which needs another part's opinion of the same completions: the part named in `gated_by`.

    That part decides which of two curves a completion is held against and does not gate this one; where it abstained
    this one does too. Asked without an opinion (`score`), all completions count as right.
    """

    config: LengthReward
    name: str
    weight: float
    version: str

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[RewardPart]:
        return self.score_given(prompts, completions, [1.0] * len(completions))

    def score_given(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], gates: Sequence[float | None]
    ) -> list[RewardPart]:
        """`gates`: the gating part's value of each completion; right = at least `gate_min`."""
        lengths = [len(completion.token_ids) for _, completion in zip(prompts, completions, strict=True)]
        return [self._part(length, gate) for length, gate in zip(lengths, gates, strict=True)]

    def _part(self, num_tokens: int, gate: float | None) -> RewardPart:
        if gate is None:
            said = Judgement(None, f"{self.config.gated_by} abstained, so no curve is known to be the right one.")
        else:
            said = _judge_cosine(self.config, num_tokens, right=gate >= self.config.gate_min)
        return RewardPart(self.name, said.value, self.weight, said.explanation, said.span, self.version)


def _judge_overlong(config: LengthReward, num_tokens: int) -> Judgement:
    free = config.max_tokens - config.buffer_tokens
    value = 1.0 + overlong_penalty(num_tokens, config.max_tokens, config.buffer_tokens)
    if num_tokens <= free:
        return Judgement(value, f"{num_tokens} tokens, free up to {free}.")
    return Judgement(value, f"{num_tokens} tokens, {num_tokens - free} over the {free} that are free.")


def _judge_cosine(config: LengthReward, num_tokens: int, *, right: bool) -> Judgement:
    value = cosine_value(num_tokens, config.max_tokens, right=right)
    if num_tokens >= config.max_tokens:
        return Judgement(value, f"{num_tokens} tokens reach the limit of {config.max_tokens}.")
    curve = "a right answer, so shorter is better" if right else "no right answer, so longer is better"
    return Judgement(value, f"{num_tokens} of {config.max_tokens} tokens for {curve}.")


def overlong_penalty(num_tokens: int, max_tokens: int, buffer_tokens: int) -> float:
    """0 up to max_tokens - buffer_tokens, falling linearly to -1 at max_tokens, -1 beyond: Yu et al. 2025, equation 13.

    Example: overlong_penalty(90, 100, 20) == -0.5.
    """
    over = num_tokens - (max_tokens - buffer_tokens)
    return max(-1.0, -over / buffer_tokens) if over > 0 else 0.0


def cosine_value(num_tokens: int, max_tokens: int, *, right: bool) -> float:
    """Right answers fall from 1 to 0.5, others rise from 0 to 0.5 along half a cosine; 0 from max_tokens on.

    The cosine reward of Yeo et al. 2025 (section 4.2) with r0 = 1, rL = 0.5 for right, r0 = 0, rL = 0.5 for
    wrong answers and the exceed penalty's reward 0, all moved into [0, 1]. Example: cosine_value(50, 100, right=True)
    == 0.75.
    """
    if num_tokens >= max_tokens:
        return 0.0
    fall = 0.25 * (1.0 - math.cos(math.pi * num_tokens / max_tokens))
    return 1.0 - fall if right else fall
