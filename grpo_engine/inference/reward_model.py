"""Scores of answers by a frozen reward model: a sequence-classification checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from grpo_engine.errors import RewardError
from grpo_engine.inference.text_models import load_text_model, padded
from grpo_engine.model.memory_limit import TokenLimit, run_micro_batches
from grpo_engine.types import TextScore, TrainRow


class _Encoded(NamedTuple):
    ids: list[int]
    segments: list[int] | None
    """0 for the question's tokens, 1 for the answer's, where the model tells them apart."""
    is_cut: bool


class RewardModel:
    """Implements protocols.TextScorer over a folder that AutoModelForSequenceClassification loads.

    One label is the score; of two the score is the second's logit minus the first's, so that its sigmoid is the
    probability of the second. Question and answer are rendered by the tokenizer's chat template, else given as a pair.

    Raises RewardError when the folder cannot be used: a language model without a trained head among them."""

    def __init__(self, folder: str, *, dtype: str, max_micro_batch_tokens: int, device: torch.device) -> None:
        self._text = load_text_model(folder, AutoModelForSequenceClassification, dtype=dtype, device=device)
        self.version = self._text.version
        self._model: Any = self._text.model
        num_labels = self._model.config.num_labels
        if num_labels not in (1, 2):
            raise RewardError(f"the reward model in {folder} has {num_labels} labels; give one with 1 or 2")
        self._limit = TokenLimit(max_micro_batch_tokens, device)
        self._device = device

    @torch.no_grad()
    def scores(self, pairs: Sequence[tuple[str, str]]) -> list[TextScore]:
        """Of (question, answer) pairs. Halves its token limit when memory runs out; raises OutOfMemory when a single
        pair does not fit."""
        encoded = [self._encode(question, answer) for question, answer in pairs]
        rows = [TrainRow(each.ids, []) for each in encoded]
        found: dict[int, float] = {}

        def work(indices: list[int], part: list[TrainRow]) -> None:
            found.update(zip(indices, self._scores([encoded[index] for index in indices]), strict=True))

        while not run_micro_batches(rows, self._limit, work, packed=False):
            found.clear()
        return [TextScore(found[index], len(each.ids), each.is_cut) for index, each in enumerate(encoded)]

    def _encode(self, question: str, answer: str) -> _Encoded:
        (asked, cut_question), (answered, cut_answer) = self._text.plain(question), self._text.plain(answer)
        tokenizer, limit = self._text.tokenizer, self._text.max_tokens
        texts: tuple[str, ...] = (asked, answered)
        is_chat = bool(tokenizer.chat_template)
        if is_chat:
            turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
            texts = (str(tokenizer.apply_chat_template(turns, tokenize=False)),)
        whole = tokenizer(*texts, add_special_tokens=not is_chat, verbose=False)
        if is_longer := len(whole["input_ids"]) > limit:
            whole = tokenizer(*texts, add_special_tokens=not is_chat, truncation=True, max_length=limit, verbose=False)
        is_cut = is_longer or cut_question or cut_answer
        if not whole["input_ids"]:  # nothing was asked or answered, and the tokenizer adds no token of its own
            return _Encoded([tokenizer.eos_token_id or 0], None, is_cut)
        return _Encoded(whole["input_ids"], None if is_chat else whole.get("token_type_ids"), is_cut)

    def _scores(self, rows: Sequence[_Encoded]) -> list[float]:
        """One forward, or one a row where no id is left to pad with."""
        pad = self._unused_id(rows)
        if pad is not None:
            return self._forward(rows, pad).tolist()
        return [float(self._forward([row], -1)) for row in rows]

    def _unused_id(self, rows: Sequence[_Encoded]) -> int | None:
        """An id that stands in no row: decoders find the last token by looking for the pad id, and one inside a text,
        or an end token that pads, would move it. -1 where nothing is padded."""
        if len({len(row.ids) for row in rows}) == 1:
            return -1
        used = {index for row in rows for index in row.ids}
        own = self._text.tokenizer.pad_token_id
        vocabulary = range(self._model.config.get_text_config().vocab_size)
        candidates = [own, *vocabulary] if own in vocabulary else vocabulary
        return next((index for index in candidates if index not in used), None)

    def _forward(self, rows: Sequence[_Encoded], pad: int) -> Tensor:
        """[B] float32."""
        self._model.config.get_text_config().pad_token_id = pad
        ids_BT, mask_BT = padded([row.ids for row in rows], pad, self._device)
        inputs = {"input_ids": ids_BT, "attention_mask": mask_BT}
        if all(row.segments is not None for row in rows):
            inputs["token_type_ids"] = padded([row.segments or [] for row in rows], 0, self._device)[0]
        logits_BL: Tensor = self._model(**inputs).logits.float()
        scores_B = logits_BL[:, 0] if logits_BL.shape[1] == 1 else logits_BL[:, 1] - logits_BL[:, 0]
        return scores_B.cpu()
