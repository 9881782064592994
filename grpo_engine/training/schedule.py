"""The learning rate of each optimizer step. Pure Python."""

from __future__ import annotations

import math

from grpo_engine.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Rate of step `step` (from 1) of `num_steps`.

    Warm-up rises linearly and reaches the peak at step `warmup_steps`; without one the first step has the peak. Cosine
    and linear then fall to `final_rate_share` x peak, reached exactly at the last step and kept beyond it. A stage no
    longer than its warm-up never falls.

    Example: with learning_rate 1, warmup_steps 2, linear to 0 in 4 steps the rates are 0.5, 1, 0.5, 0."""
    peak = config.learning_rate
    peak_step = max(1, config.warmup_steps)
    if step < peak_step:
        return peak * step / peak_step
    if config.schedule == "constant" or step == peak_step:
        return peak
    final = peak * config.final_rate_share
    if step >= num_steps:
        return final
    progress = (step - peak_step) / (num_steps - peak_step)
    shape = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return final + (peak - final) * shape
