"""A server backend on stand-ins for vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from grpo_engine.config import SamplingConfig
from grpo_engine.config_rollout import VLLMServerRollout
from grpo_engine.rollout.vllm.pool import VLLMServerSampler
from grpo_engine.types import SampleRequest
from tests.unit.tiny_models import TOKENIZER
from tests.vllm_stand_in import StandIn

WEIGHTS = {"head.weight": torch.arange(6.0).reshape(2, 3)}
SAMPLING = SamplingConfig(max_new_tokens=4)
REQUESTS = [SampleRequest([5, 6, 7], (0, copy), "0") for copy in range(6)]


def make(folder: Path, servers: list[StandIn], **fields: Any) -> VLLMServerSampler:
    """On the stand-ins' addresses, or on processes of its own where there are none."""
    told = {"health_interval_s": 0.05, "max_attempts": 3, "addresses": [server.address for server in servers]}
    config = VLLMServerRollout(**{**told, **fields})
    return VLLMServerSampler(config, folder, TOKENIZER, {2}, 64, log_folder=folder)
