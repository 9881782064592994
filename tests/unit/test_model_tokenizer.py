"""The character tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from grpo_engine.model.tokenizer import ALPHABET, SPECIAL_TOKENS, character_tokenizer

DEMONSTRATION = "347+285=<think>7+5=12;4+8+1=13;3+2+1=6</think>632<eos>"


def test_every_character_and_every_special_token_is_one_id() -> None:
    tokenizer = character_tokenizer()
    assert tokenizer(ALPHABET + "".join(SPECIAL_TOKENS)).input_ids == [*range(6, 56), *range(6)]
    assert len(tokenizer) == 56


def test_decoding_gives_the_text_back() -> None:
    tokenizer = character_tokenizer()
    ids = tokenizer(DEMONSTRATION).input_ids
    assert len(ids) == len(DEMONSTRATION) - (len("<think>") + len("</think>") + len("<eos>")) + 3
    assert tokenizer.decode(ids, skip_special_tokens=False) == DEMONSTRATION


@pytest.mark.parametrize("character", ["A", "\n", "\u00e9", "\u200b", "\U0001f600"])
def test_each_unknown_character_is_one_unk(character: str) -> None:
    tokenizer = character_tokenizer()
    ids = tokenizer(f"1{character}{character}2").input_ids
    unknown = tokenizer.unk_token_id
    assert ids == [tokenizer("1").input_ids[0], unknown, unknown, tokenizer("2").input_ids[0]]


def test_saving_and_loading_keeps_ids_and_settings(tmp_path: Path) -> None:
    tokenizer = character_tokenizer(max_context_tokens=99)
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = DEMONSTRATION + "  A<pad> <unk>"
    assert again(text).input_ids == tokenizer(text).input_ids
    assert again.decode(again(text).input_ids) == tokenizer.decode(tokenizer(text).input_ids)
    assert (again.eos_token_id, again.pad_token_id, again.model_max_length) == (2, 0, 99)
    assert again.is_fast
