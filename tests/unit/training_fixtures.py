"""Small models and rows for the tests of training, inference and checkpoints."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_engine.config import OptimizerConfig
from grpo_engine.training.learner import TorchLearner
from grpo_engine.training.objectives import Objective, PolicyObjective
from grpo_engine.types import TrainRow

VOCABULARY = 23
POLICY = PolicyObjective(clip_low=0.2, clip_high=0.28, kl_weight=0.1, temperature=0.7, track_kl=True)


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


def learner(model: LlamaForCausalLM, objective: Objective | None = None, **options: Any) -> TorchLearner:
    """A learner with KL in the loss, temperature 0.7 and micro-batches of three rows."""
    optimizer = OptimizerConfig(**({"learning_rate": 1e-2} | options.pop("optimizer", {})))
    settings: dict[str, Any] = {"num_steps": 10, "max_micro_batch_rows": 3, "dtype": "float32", "pad_token_id": 0}
    return TorchLearner(model, optimizer, objective=objective or POLICY, **(settings | options))


def gradients(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def weights(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_equal_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
