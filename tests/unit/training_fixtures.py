"""Small models and rows for the tests of training, inference and checkpoints."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_engine.types import TrainRow

VOCABULARY = 23


def tiny_llama(*, dtype: torch.dtype = torch.float64, seed: int = 0, **options: Any) -> LlamaForCausalLM:
    """Two layers of width 16; large initial weights, so that the distributions are far from uniform."""
    torch.manual_seed(seed)
    settings = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    settings |= {"intermediate_size": 24, "max_position_embeddings": 64, "initializer_range": 0.3, "pad_token_id": 0}
    config = LlamaConfig(**(settings | {"bos_token_id": None, "eos_token_id": 1} | options))
    return LlamaForCausalLM(config).to(dtype)


def ragged_rows(count: int = 7, *, seed: int = 0, kept: bool = False, **fields: Any) -> list[TrainRow]:
    """Rows of unequal lengths; log-probabilities, advantages and masks are random but plausible."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        prompt = [draw.randrange(2, VOCABULARY) for _ in range(draw.randrange(1, 6))]
        completion = [draw.randrange(0, VOCABULARY) for _ in range(draw.randrange(1, 9))]
        noise = [draw.gauss(-2.5, 0.4) for _ in completion]
        values: dict[str, Any] = {
            "advantage": draw.gauss(0, 1),
            "rollout_logprobs": noise,
            "old_logprobs": [value + draw.gauss(0, 0.3) for value in noise],
            "ref_logprobs": [value + draw.gauss(0, 0.3) for value in noise],
            "loss_mask": [draw.random() < 0.8 for _ in completion],
            "kept_ids": [sorted({token, *draw.sample(range(VOCABULARY), 4)}) for token in completion] if kept else None,
        }
        rows.append(TrainRow(prompt, completion, **(values | fields)))
    return rows
