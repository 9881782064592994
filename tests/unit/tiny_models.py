"""Small models of several families for tests of sampling and log-probabilities."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from grpo_engine.model.tokenizer import character_tokenizer

TOKENIZER = character_tokenizer(max_context_tokens=64)
WIDTHS: dict[str, Any] = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _deepseek() -> Any:
    ranks = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    sizes = {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "num_key_value_heads": 4}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**WIDTHS, **ranks, **experts, **sizes))


def tiny_model(family: str) -> PreTrainedModel:
    """A seeded model in float32: llama; untied; wide (more ids than the tokenizer); mistral (2 key-value heads, window
    6); qwen2 (one windowed layer); qwen3 (normed heads, one windowed layer); deepseek (latent attention, values
    narrower than keys); gemma2 (capped logits, windows); gpt2; bloom (ALiBi)."""
    torch.manual_seed(7)
    model: Any
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**WIDTHS, num_key_value_heads=4, tie_word_embeddings=True))
    elif family == "untied":
        model = LlamaForCausalLM(LlamaConfig(**WIDTHS, num_key_value_heads=1, tie_word_embeddings=False))
    elif family == "wide":
        more = {**WIDTHS, "vocab_size": len(TOKENIZER) + 40}
        model = LlamaForCausalLM(LlamaConfig(**more, num_key_value_heads=4, tie_word_embeddings=True))
    elif family == "gemma2":
        shape = {"head_dim": 8, "sliding_window": 6, "final_logit_softcapping": 5.0}
        model = Gemma2ForCausalLM(Gemma2Config(**WIDTHS, num_key_value_heads=2, **shape))
    elif family == "bloom":
        shape = {"hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0}
        model = BloomForCausalLM(BloomConfig(vocab_size=len(TOKENIZER), **shape, initializer_range=0.3, eos_token_id=2))
    elif family == "deepseek":
        model = _deepseek()
    elif family == "mistral":
        model = MistralForCausalLM(MistralConfig(**WIDTHS, num_key_value_heads=2, sliding_window=6))
    elif family == "qwen2":
        layers = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
        model = Qwen2ForCausalLM(Qwen2Config(**WIDTHS, num_key_value_heads=2, **layers))
    elif family == "qwen3":
        layers = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "head_dim": 12}
        model = Qwen3ForCausalLM(Qwen3Config(**WIDTHS, num_key_value_heads=2, **layers))
    else:
        shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        dropout = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
        ends = {"eos_token_id": 2, "bos_token_id": 1}
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=len(TOKENIZER), **shape, **dropout, **ends, initializer_range=0.3)
        )
    trained: PreTrainedModel = model.train()
    return trained
