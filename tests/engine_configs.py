"""Small run configs that the real engine trains in seconds."""

from __future__ import annotations

from typing import Any

from grpo_engine.config import RunConfig

TINY_MODEL = {
    "source": "tiny_llama",
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 2,
    "intermediate_size": 32,
    "max_context_tokens": 48,
}


def sft_stage(**changes: Any) -> dict[str, Any]:
    return {
        "kind": "sft",
        "data": {"source": "addition", "num_digits": 1, "think_share": 0.5},
        "num_steps": 10,
        "rows_per_step": 8,
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 2, "schedule": "cosine"},
        "checkpoint": {"every_steps": 5},
        **changes,
    }


def rl_stage(**changes: Any) -> dict[str, Any]:
    return {
        "kind": "rl",
        "data": {"source": "addition", "num_digits": 1},
        # The length part gives an untrained policy something to learn from in every group.
        "rewards": [
            {"kind": "accuracy", "compare": "number"},
            {"kind": "length", "max_tokens": 16, "buffer_tokens": 15},
        ],
        "num_steps": 10,
        "prompts_per_step": 4,
        "group_size": 4,
        "sampling": {"max_new_tokens": 16},
        "optimizer": {"learning_rate": 1e-3},
        "evaluation": {"every_steps": 5, "num_prompts": 8},
        "early_stopping": {"warmup_steps": 3},
        "checkpoint": {"every_steps": 3},
        **changes,
    }


def tiny_config(*stages: dict[str, Any], **changes: Any) -> RunConfig:
    """A deterministic one-thread run; an SFT and an RL stage unless stages are given."""
    data: dict[str, Any] = {
        "name": "tiny",
        "deterministic": True,
        "num_threads": 1,
        "model": TINY_MODEL,
        "stages": list(stages) or [sft_stage(), rl_stage()],
        **changes,
    }
    return RunConfig.model_validate(data)
