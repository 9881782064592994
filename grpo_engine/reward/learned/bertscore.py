"""BERTScore (Zhang et al. 2020, equation 1 and F1) of an answer against a gold text, without idf and rescaling.

Every token of one text is matched with the most similar token of the other, by the cosine of their hidden states:

    precision = mean over the answer's tokens of max cosine, recall = the same over the gold's tokens
    F1 = 2 precision recall / (precision + recall), from 0 to 1; 0 where either is not positive
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from grpo_engine.config_rewards import BertScoreReward
from grpo_engine.protocols import TextEncoder
from grpo_engine.reward.extraction import Extraction
from grpo_engine.reward.learned import texts
from grpo_engine.reward.learned.texts import answer_of
from grpo_engine.reward.metric import Judgement
from grpo_engine.reward.versions import module_source, version_of
from grpo_engine.types import Completion, Prompt, RewardPart, TextVectors

MAX_GOLDS = 16
"""Gold texts of a row that are compared; the best match counts."""
Vectors = npt.NDArray[np.float32]


class BertScore:
    """A reward part. Several gold texts: the best F1. An empty answer gets 0, a row without gold abstains."""

    def __init__(self, config: BertScoreReward, encoder: TextEncoder) -> None:
        self.name: str = config.kind
        self.weight = config.weight
        layer = "last" if config.layer is None else str(config.layer)
        self.version = version_of(
            config.kind, module_source(__file__, texts.__file__), encoder.version.encode(), layer.encode()
        )
        self._config = config
        self._encoder = encoder

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[RewardPart]:
        size = self._config.max_rows  # what is embedded at a time stays in memory
        parts: list[RewardPart] = []
        for start in range(0, len(prompts), size):
            said = self._judge(prompts[start : start + size], completions[start : start + size])
            parts += [RewardPart(self.name, s.value, self.weight, s.explanation, s.span, self.version) for s in said]
        return parts

    def _judge(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Judgement]:
        answers = [answer_of(self._config.extract, *pair) for pair in zip(prompts, completions, strict=True)]
        golds = [gold_texts(prompt.columns.get(self._config.column)) for prompt in prompts]
        wanted = dict.fromkeys(
            text
            for answer, texts_of in zip(answers, golds, strict=True)
            if answer.text is not None and texts_of
            for text in (answer.text, *texts_of)
        )
        vectors = dict(zip(wanted, self._encoder.embed(list(wanted)), strict=True))
        return [self._judgement(a, g, vectors) for a, g in zip(answers, golds, strict=True)]

    def _judgement(self, answer: Extraction, golds: list[str], vectors: dict[str, TextVectors]) -> Judgement:
        if not golds:
            return Judgement(None, f"The row's column {self._config.column} holds no text to compare with.")
        if answer.text is None:
            return Judgement(0.0, f"{answer.reason}; an empty answer gets 0.")
        mine = vectors[answer.text]
        found = [(*match(mine.vectors, vectors[gold].vectors), gold) for gold in golds]
        f1, precision, recall, gold = max(found, key=lambda each: each[0])
        said = f"BERTScore F1 {f1:.3f} (precision {precision:.3f}, recall {recall:.3f})"
        said += f" against {gold[:80]!r}" + (f", the best of {len(golds)} gold texts." if len(golds) > 1 else ".")
        if mine.is_cut or vectors[gold].is_cut:
            cut = "The answer" if mine.is_cut else "The gold text"
            said += f" {cut} is longer than the encoder reads; its end was left out."
        return Judgement(f1, said, answer.span)


def match(answer_AD: Vectors, gold_GD: Vectors) -> tuple[float, float, float]:
    """F1, precision and recall of hidden states [tokens, width]; all 0 where either text has no token.

    Example: equal vectors give (1.0, 1.0, 1.0)."""
    if not len(answer_AD) or not len(gold_GD):
        return 0.0, 0.0, 0.0
    cosine_AG = _unit(answer_AD) @ _unit(gold_GD).T
    precision, recall = float(cosine_AG.max(axis=1).mean()), float(cosine_AG.max(axis=0).mean())
    if not (precision > 0 and recall > 0):
        return 0.0, precision, recall
    return min(1.0, 2 * precision * recall / (precision + recall)), precision, recall


def gold_texts(value: Any) -> list[str]:
    """The column's texts: one, a number, or a list of them; blank ones left out."""
    values = value if isinstance(value, list) else [value]
    given = [str(each) for each in values if isinstance(each, str | int | float) and not isinstance(each, bool)]
    return [text.strip() for text in given if text.strip()][:MAX_GOLDS]


def _unit(vectors: Vectors) -> npt.NDArray[np.float64]:
    wide = vectors.astype(np.float64)
    length = np.linalg.norm(wide, axis=1, keepdims=True)
    unit: npt.NDArray[np.float64] = wide / np.maximum(length, 1e-12)
    return unit
