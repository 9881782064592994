"""Memory that a run will need, estimated from shapes. Torch-free.

    weights      4 N, float32 masters; bfloat16 casts one layer at a time under autocast and is not counted
    gradients    4 N
    optimizer    8 N, AdamW's two moments in float32
    reference    4 N, when an RL stage measures or weighs KL
    activations  R T L (14 h + 4 i) b: what a Llama block keeps for its backward pass, R micro-batch rows of T tokens
    logits       3 x 64 MiB: chunks of logits, their softmax and gradient (grpo_engine.model.logprobs.CHUNK_ELEMENTS)
    kv cache     S T 2 L k d b, S rows sampled at once
    base         600 MB, the libraries

N parameters, L layers, h width, i width of the feed-forward layer, k key-value heads of size d, b bytes of the compute
type. Sampling and training take turns, so that the larger of kv cache and activations + logits counts.
"""

from __future__ import annotations

import psutil

from grpo_engine.checks.model_folder import ModelShape
from grpo_engine.config import RLStage, RunConfig, SFTStage

BASE_BYTES = 600_000_000
LOGITS_BYTES = 3 * 2**26
MAX_SAMPLED_ROWS = 256


def estimate(config: RunConfig, shape: ModelShape, row_tokens: list[int]) -> dict[str, int]:
    """Bytes by use over all stages, the largest of each. `row_tokens[i]`: longest prompt plus completion of stage i."""
    n, number_bytes = shape.num_parameters, 2 if config.dtype == "bfloat16" else 4
    pairs = list(zip(config.stages, row_tokens, strict=True))
    activations = max(_activations(stage, tokens, shape, number_bytes) for stage, tokens in pairs)
    kv_cache = max(_kv_cache(stage, tokens, shape, number_bytes) for stage, tokens in pairs)
    uses = {
        "weights_bytes": 4 * n,
        "gradients_bytes": 4 * n,
        "optimizer_bytes": 8 * n,
        "reference_bytes": 4 * n if any(_has_reference(stage) for stage in config.stages) else 0,
        "activations_bytes": activations,
        "logits_bytes": LOGITS_BYTES,
        "kv_cache_bytes": kv_cache,
        "base_bytes": BASE_BYTES,
    }
    idle = min(kv_cache, activations + LOGITS_BYTES)
    available = int(psutil.virtual_memory().available)
    return {"parameters": n, **uses, "total_bytes": sum(uses.values()) - idle, "available_bytes": available}


def _has_reference(stage: SFTStage | RLStage) -> bool:
    return isinstance(stage, RLStage) and (stage.track_kl or stage.kl_weight > 0)


def _activations(stage: SFTStage | RLStage, tokens: int, shape: ModelShape, number_bytes: int) -> int:
    rows = stage.prompts_per_step * stage.group_size if isinstance(stage, RLStage) else stage.rows_per_step
    width = 14 * shape.hidden_size + 4 * shape.intermediate_size
    return min(rows, stage.max_micro_batch_rows) * tokens * shape.num_layers * width * number_bytes


def _kv_cache(stage: SFTStage | RLStage, tokens: int, shape: ModelShape, number_bytes: int) -> int:
    if not isinstance(stage, RLStage):
        return 0
    rows = min(max(stage.prompts_per_step * stage.group_size, stage.evaluation.num_prompts), MAX_SAMPLED_ROWS)
    return rows * tokens * 2 * shape.num_layers * shape.num_kv_heads * shape.head_size * number_bytes
