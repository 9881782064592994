"""Texts as the hidden states of their tokens, by any encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModel

from grpo_engine.errors import RewardError
from grpo_engine.inference.text_models import load_text_model, padded
from grpo_engine.types import TextVectors


class Encoder:
    """Implements protocols.TextEncoder over a folder that AutoModel loads, in float32.

    Raises RewardError when the folder cannot be used, or has no such layer."""

    def __init__(self, folder: str, *, layer: int | None, max_rows: int, device: torch.device) -> None:
        """`layer`: hidden layer, 0 = embeddings, None = the last; `max_rows`: texts a forward."""
        self._text = load_text_model(folder, AutoModel, dtype="float32", device=device)
        self.version = self._text.version
        self._model: Any = self._text.model
        if self._model.config.is_encoder_decoder:
            self._model = self._model.get_encoder()
        num_layers = self._model.config.get_text_config().num_hidden_layers
        if layer is not None and layer > num_layers:
            raise RewardError(f"layer {layer}: the model in {folder} has layers 0 to {num_layers}; give one of them")
        self._layer = num_layers if layer is None else layer
        self._is_last = layer is None
        self._max_rows = max_rows
        self._device = device

    def embed(self, texts: Sequence[str]) -> list[TextVectors]:
        """Texts of similar length go together. A text without tokens of its own gets no vectors."""
        encoded = [self._encode(text) for text in texts]
        order = sorted(range(len(texts)), key=lambda index: len(encoded[index][0]))
        found: dict[int, TextVectors] = {}
        for start in range(0, len(order), self._max_rows):
            chosen = order[start : start + self._max_rows]
            found |= zip(chosen, self._forward([encoded[index] for index in chosen]), strict=True)
        return [found[index] for index in range(len(texts))]

    def _encode(self, text: str) -> tuple[list[int], list[bool], bool]:
        """Ids, True where a token is the text's own, and whether the text was cut."""
        shown, is_cut = self._text.plain(text)
        limit = self._text.max_tokens
        whole = self._text.tokenizer(shown, return_special_tokens_mask=True, verbose=False)
        if is_longer := len(whole["input_ids"]) > limit:
            whole = self._text.tokenizer(shown, truncation=True, max_length=limit, return_special_tokens_mask=True)
        return whole["input_ids"], [not special for special in whole["special_tokens_mask"]], is_cut or is_longer

    @torch.no_grad()
    def _forward(self, rows: Sequence[tuple[list[int], list[bool], bool]]) -> list[TextVectors]:
        pad = self._text.tokenizer.pad_token_id or 0
        lengths = [len(ids) for ids, _, _ in rows]
        if not max(lengths):
            width = self._model.config.get_text_config().hidden_size
            return [TextVectors(torch.zeros(0, width).numpy(), is_cut) for _, _, is_cut in rows]
        ids_BT, mask_BT = padded([ids or [pad] for ids, _, _ in rows], pad, self._device)
        output = self._model(input_ids=ids_BT, attention_mask=mask_BT, output_hidden_states=not self._is_last)
        hidden_BTD = output.last_hidden_state if self._is_last else output.hidden_states[self._layer]
        states = hidden_BTD.float().cpu()
        return [
            TextVectors(states[index, : len(ids)][torch.tensor(own, dtype=torch.bool)].numpy(), is_cut)
            for index, (ids, own, is_cut) in enumerate(rows)
        ]
