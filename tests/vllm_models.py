"""Small models whose shapes vLLM accepts, vLLM started on them, what a plain float32 forward says of completions."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from grpo_engine.config_rollout import VLLMRollout
from grpo_engine.model.tokenizer import character_tokenizer
from grpo_engine.rollout.vllm.folder import write_model_folder
from grpo_engine.rollout.vllm.sampler import VLLMSampler
from grpo_engine.types import Completion, SampleRequest

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here: run make install-vllm"
)
of_vllm = [needs_vllm, pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(1800)]
"""Marks of a file of such tests: vLLM warns of its own, and takes a minute to start where others work."""
CONTEXT = 256
TOKENIZER = character_tokenizer(CONTEXT)
EOS = 2
VOCABULARY = 72
"""More than the tokenizer's 56 ids, as in models whose embedding is padded."""
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}


def vllm_model(family: str, *, tied: bool = True, seed: int = 7, **shape: Any) -> PreTrainedModel:
    """A seeded float32 model: llama; mistral (2 key-value heads, window 16); qwen2 (2 key-value heads, biases)."""
    torch.manual_seed(seed)
    shape = SHAPE | {"tie_word_embeddings": tied} | shape
    model: Any
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=4))
    elif family == "mistral":
        model = MistralForCausalLM(MistralConfig(**shape, num_key_value_heads=2, sliding_window=16))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**shape, num_key_value_heads=2))
    made: PreTrainedModel = model.eval()
    return made


def write_folder(model: PreTrainedModel, folder: Path, *, weights: bool = False) -> Path:
    """What vLLM starts from."""
    write_model_folder(model, TOKENIZER, folder, weights=weights)
    return folder


def start_vllm(model: PreTrainedModel, folder: Path, ends: Collection[int] = (), **config: Any) -> VLLMSampler:
    """vLLM in this process, holding the model's weights as of version 1."""
    made = VLLMSampler(VLLMRollout.model_validate(config), write_folder(model, folder), TOKENIZER, ends, CONTEXT)
    made.load_weights(model.named_parameters(), 1)
    return made


@torch.no_grad()
def plain_logits(model: PreTrainedModel, prompt_ids: list[int], completion: Completion) -> Tensor:
    """Float32 [T, V] by one forward without cache, padding or batch."""
    logits = model(torch.tensor([prompt_ids + completion.token_ids])).logits[0].float()
    return torch.as_tensor(logits[len(prompt_ids) - 1 : -1])


def plain_logprobs(
    model: PreTrainedModel, prompt_ids: list[int], completion: Completion, temperature: float
) -> tuple[Tensor, Tensor]:
    """Float32 [T] each: over the completion's kept ids, and untruncated."""
    scaled = plain_logits(model, prompt_ids, completion) / temperature
    full = scaled.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    if completion.kept_ids is None:
        return full, full
    mass = [row[kept].logsumexp(-1) - row.logsumexp(-1) for row, kept in zip(scaled, completion.kept_ids, strict=True)]
    return full - torch.stack(mass), full


def worst_gap(
    model: PreTrainedModel, asked: Sequence[SampleRequest], found: Sequence[Completion], temperature: float
) -> float:
    """Largest difference of any log-probability of the completions to a plain forward's."""
    gaps = []
    for request, completion in zip(asked, found, strict=True):
        sampled, full = plain_logprobs(model, request.prompt_ids, completion, temperature)
        gaps += [sampled - torch.tensor(completion.logprobs), full - torch.tensor(completion.full_logprobs)]
    return max(float(gap.abs().max()) for gap in gaps)
