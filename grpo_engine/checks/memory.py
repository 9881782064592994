"""Memory that a run will need, estimated from shapes. Torch-free.

    weights      4 N, float32 masters; bfloat16 casts one layer at a time under autocast and is not counted
    adapter      4 A, with LoRA
    gradients    4 N, or 4 A with LoRA
    optimizer    8 N, or 8 A: AdamW's two moments in float32
    reference    4 N, when an RL stage measures or weighs KL; nothing with LoRA, whose reference is the base itself
    critic       16 N for PPO's copied value model (weights, gradients, two moments), 16 (h + 1) for a shared one
    mtp          16 D (2 h^2 + 2 h d (a + k) + 3 h i + 5 h): weights, gradients and two moments of D prediction heads
    activations  U L (14 h + 4 i) b: what a Llama block keeps for its backward pass, U tokens of a micro-batch; twice
                 with a copied critic. Recomputed (memory.gradient_checkpointing) parts are kept for one layer only,
                 beside each layer's input: attention counts 8 h of it, feed-forward 6 h + 4 i
    logits       3 x 64 MiB: chunks of logits, their softmax and gradient (grpo_engine.model.logprobs.CHUNK_ELEMENTS)
    kv cache     S T 2 L k d b, S rows sampled at once (rollout.max_rows at most)
    vllm         2 N at bfloat16, 4 N at float32, and rollout.cpu_cache_gib: a copy of the policy in this process, or in
                 each server that a rank starts; its cache takes the place of the kv cache above
    base         600 MB, the libraries

N parameters, A parameters of the adapters, L layers, h width, i width of the feed-forward layer, a heads and k
key-value heads of size d, b bytes of the compute type, T tokens of the longest row. Each is the largest of all stages
and of one rank: every rank holds whole weights, gradients, optimizer, reference and critic, and takes its share of the
rows. Sampling and training take turns, so that the larger of kv cache and activations + logits counts. `total_bytes` is
the sum of one rank times needs.num_ranks.
"""

from __future__ import annotations

import math

import psutil

from grpo_engine.checks.model_folder import ModelShape
from grpo_engine.config import RLStage, RunConfig, SFTStage
from grpo_engine.config_rollout import TorchRollout, VLLMServerRollout
from grpo_engine.config_training import AdapterConfig, GAEAdvantage, LoraAdapter, ValueConfig

BASE_BYTES = 600_000_000
LOGITS_BYTES = 3 * 2**26


def estimate(config: RunConfig, shape: ModelShape, row_tokens: list[int]) -> dict[str, int]:
    """Bytes by use, the largest of all stages. `row_tokens[i]`: longest prompt plus completion of stage i."""
    adapter = adapter_parameters(config.adapter, shape)
    trained = adapter or shape.num_parameters
    number_bytes, ranks = 2 if config.dtype == "bfloat16" else 4, config.needs.num_ranks
    pairs = list(zip(config.stages, row_tokens, strict=True))
    activations = max(_activations(stage, tokens, shape, number_bytes, ranks) for stage, tokens in pairs)
    kv_cache = max(_kv_cache(config, stage, tokens, shape, number_bytes) for stage, tokens in pairs)
    has_reference = any(isinstance(stage, RLStage) and stage.wants_reference for stage in config.stages)
    uses = {
        "weights_bytes": 4 * shape.num_parameters,
        "adapter_bytes": 4 * adapter,
        "gradients_bytes": 4 * trained,
        "optimizer_bytes": 8 * trained,
        "reference_bytes": 4 * shape.num_parameters if has_reference and not adapter else 0,
        "critic_bytes": max(_critic(stage, shape) for stage in config.stages),
        "mtp_bytes": 16 * config.mtp.depth * mtp_parameters(shape),
        "activations_bytes": activations,
        "logits_bytes": LOGITS_BYTES,
        "kv_cache_bytes": kv_cache,
        "vllm_bytes": _vllm(config, shape, number_bytes),
        "base_bytes": BASE_BYTES,
    }
    uses = {
        name: size for name, size in uses.items() if size or not name.startswith(("adapter", "critic", "mtp", "vllm"))
    }
    rank = sum(uses.values()) - min(kv_cache, activations + LOGITS_BYTES)
    several = {"num_ranks": ranks, "rank_bytes": rank} if ranks > 1 else {}
    available = int(psutil.virtual_memory().available)
    parameters = {"parameters": shape.num_parameters} | ({"adapter_parameters": adapter} if adapter else {})
    return {**parameters, **uses, **several, "total_bytes": ranks * rank, "available_bytes": available}


def adapter_parameters(config: AdapterConfig, shape: ModelShape) -> int:
    """Sum over the adapted linear layers of rank x (inputs + outputs); a name not known here counts as h x h."""
    if not isinstance(config, LoraAdapter):
        return 0
    h, i = shape.hidden_size, shape.intermediate_size
    inner, outer = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    widths = {
        "q_proj": h + inner, "k_proj": h + outer, "v_proj": h + outer, "o_proj": inner + h,
        "gate_proj": h + i, "up_proj": h + i, "down_proj": i + h,
    }  # fmt: skip
    names = config.target_modules or list(widths)
    return config.rank * shape.num_layers * sum(widths.get(name, 2 * h) for name in names)


def mtp_parameters(shape: ModelShape) -> int:
    """Of one block of `model.mtp`."""
    h, attention = shape.hidden_size, shape.head_size * (shape.num_heads + shape.num_kv_heads)
    return 2 * h * h + 2 * h * attention + 3 * h * shape.intermediate_size + 5 * h


def _value(stage: SFTStage | RLStage) -> ValueConfig | None:
    advantage = stage.advantage if isinstance(stage, RLStage) else None
    return advantage.value if isinstance(advantage, GAEAdvantage) else None


def _critic(stage: SFTStage | RLStage, shape: ModelShape) -> int:
    value = _value(stage)
    if value is None:
        return 0
    head = shape.hidden_size + 1
    return 16 * (shape.num_parameters + head if value.backbone == "copied" else head)


def _activations(stage: SFTStage | RLStage, tokens: int, shape: ModelShape, number_bytes: int, ranks: int) -> int:
    rows = stage.prompts_per_step * stage.group_size if isinstance(stage, RLStage) else stage.rows_per_step
    held = min(math.ceil(rows / ranks) * tokens, max(stage.memory.max_micro_batch_tokens, tokens))
    value = _value(stage)
    copies = 2 if value is not None and value.backbone == "copied" else 1
    return copies * held * _width(stage.memory.gradient_checkpointing, shape) * number_bytes


def _width(recomputed: str, shape: ModelShape) -> int:
    """Numbers kept a token over all layers."""
    h = shape.hidden_size
    attention, feed_forward = 8 * h, 6 * h + 4 * shape.intermediate_size
    match recomputed:
        case "full":
            every, once = h, attention + feed_forward
        case "attention":
            every, once = h + feed_forward, attention
        case "feed_forward":
            every, once = h + attention, feed_forward
        case _:
            every, once = attention + feed_forward, 0
    return shape.num_layers * every + once


def _kv_cache(config: RunConfig, stage: SFTStage | RLStage, tokens: int, shape: ModelShape, number_bytes: int) -> int:
    if not isinstance(stage, RLStage) or not isinstance(config.rollout, TorchRollout):
        return 0
    sampled = max(stage.prompts_per_step * stage.group_size, stage.evaluation.num_prompts)
    rows = math.ceil(sampled / config.needs.num_ranks)
    width = 2 * shape.num_layers * shape.num_kv_heads * shape.head_size
    return min(rows, config.rollout.max_rows) * tokens * width * number_bytes


def _vllm(config: RunConfig, shape: ModelShape, number_bytes: int) -> int:
    """Of one rank; nothing where the servers run elsewhere."""
    rollout = config.rollout
    if isinstance(rollout, TorchRollout) or not any(isinstance(stage, RLStage) for stage in config.stages):
        return 0
    copies = 1
    if isinstance(rollout, VLLMServerRollout):
        copies = 0 if rollout.addresses else rollout.num_servers
    return copies * (number_bytes * shape.num_parameters + rollout.cpu_cache_gib * 2**30)
