"""A reward model's scores as a reward part."""

from __future__ import annotations

import math
from collections.abc import Sequence

from grpo_engine.config_rewards import RewardModelReward
from grpo_engine.protocols import TextScorer
from grpo_engine.reward.learned import texts
from grpo_engine.reward.learned.texts import answer_of, question_of
from grpo_engine.reward.versions import module_source, version_of
from grpo_engine.types import Completion, Prompt, RewardPart, TextScore


class RewardModelPart:
    """Judges each answer to its question; a missing answer is judged as an empty one. A score that is not finite
    abstains."""

    def __init__(self, config: RewardModelReward, scorer: TextScorer) -> None:
        self.name: str = config.kind
        self.weight = config.weight
        settings = f"{config.squash} {config.dtype} {config.extract}"
        self.version = version_of(
            config.kind, module_source(__file__, texts.__file__), scorer.version.encode(), settings.encode()
        )
        self._config = config
        self._scorer = scorer

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[RewardPart]:
        answers = [answer_of(self._config.extract, *pair) for pair in zip(prompts, completions, strict=True)]
        pairs = [(question_of(p), answer.text or "") for p, answer in zip(prompts, answers, strict=True)]
        unique = list(dict.fromkeys(pairs))
        scored = dict(zip(unique, self._scorer.scores(unique), strict=True))
        return [self._part(scored[pair], answer.span) for pair, answer in zip(pairs, answers, strict=True)]

    def _part(self, said: TextScore, span: tuple[int, int] | None) -> RewardPart:
        explanation = f"The reward model read {said.num_tokens} tokens and gave {said.score:.4g}"
        value: float | None = said.score
        if not math.isfinite(said.score):
            value = None
            explanation += ", which is not a number to learn from"
        elif self._config.squash == "sigmoid":
            value = sigmoid(said.score)
            explanation += f"; its sigmoid is {value:.4g}"
        cut = " The text is longer than it reads; its end was left out." if said.is_cut else ""
        return RewardPart(self.name, value, self.weight, f"{explanation}.{cut}", span, self.version)


def sigmoid(score: float) -> float:
    """1 / (1 + exp(-score)), without overflow."""
    return 1 / (1 + math.exp(-score)) if score >= 0 else math.exp(score) / (1 + math.exp(score))
