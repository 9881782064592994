"""What vLLM is told: from a run's config to engine arguments, environment, and sampling parameters. Needs no vLLM.

One place for the engine in this process and for servers, so that both sample alike.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from grpo_engine.config import SamplingConfig
from grpo_engine.config_rollout import VLLMEngine, VLLMRollout, VLLMSpeculation
from grpo_engine.errors import RolloutUnavailable
from grpo_engine.streams import raw_stream

EXTENSION = "grpo_engine.rollout.vllm.extension.CohortWorker"
WEIGHT_BACKEND = "cohort"
"""Name of our weight transfer backend (`extension`) in vLLM's RL API."""
ALL_KEPT = -1
"""`logprobs` of a truncated request: as many entries a token as its step kept tokens at most."""
CPU_BLOCK_TOKENS = 32
"""Tokens of a cache block on the CPU. vLLM's own 128 would never share a prompt of a hundred tokens."""


def require_vllm() -> None:
    """Raises RolloutUnavailable with a remedy where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise RolloutUnavailable(
            "vLLM is not installed on this host; run `make install-vllm` there, or set rollout.backend to torch"
        )


def engine_options(
    config: VLLMEngine, folder: Path, *, dtype: str, max_context_tokens: int, on_cpu: bool, seed: int
) -> dict[str, Any]:
    """Engine arguments (of `vllm.LLM`; `server_arguments` makes a command line of them).

    A folder without weights is started with random ones: nothing may be sampled before the first update.
    """
    options: dict[str, Any] = {
        "model": str(folder),
        "load_format": "auto" if has_weights(folder) else "dummy",
        "dtype": dtype,
        "seed": seed % 2**31,
        "max_model_len": context_tokens(config, max_context_tokens),
        "max_num_seqs": config.max_rows,
        "enforce_eager": on_cpu if config.enforce_eager is None else config.enforce_eager,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,
        # Else the folder's generation_config.json would fill in a temperature that nobody asked for.
        "generation_config": "vllm",
        "worker_extension_cls": EXTENSION,
        "weight_transfer_config": {"backend": WEIGHT_BACKEND},
        "enable_prefix_caching": True,
        "trust_remote_code": False,
    }
    if on_cpu:
        options["block_size"] = CPU_BLOCK_TOKENS
    else:
        options["gpu_memory_utilization"] = config.memory_share
        options["enable_sleep_mode"] = isinstance(config, VLLMRollout) and config.sleep
    if config.speculation is not None:
        options["speculative_config"] = speculative_options(config.speculation)
    return options


def speculative_options(speculation: VLLMSpeculation) -> dict[str, Any]:
    """vLLM's speculative_config.

    Example: {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    """
    options: dict[str, Any] = {"method": speculation.method, "num_speculative_tokens": speculation.num_tokens}
    if speculation.method == "ngram":
        options |= {"prompt_lookup_max": speculation.max_match, "prompt_lookup_min": speculation.min_match}
    if speculation.model is not None:
        options["model"] = speculation.model
    return options


def context_tokens(config: VLLMEngine, max_context_tokens: int) -> int:
    """Longest prompt plus completion that vLLM is set up for."""
    return min(config.max_model_len or max_context_tokens, max_context_tokens)


def has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


def server_arguments(options: Mapping[str, Any]) -> list[str]:
    """Engine options as flags of vLLM's server.

    Example: server_arguments({"max_model_len": 64, "enforce_eager": True}) == ["--max-model-len=64", "--enforce-eager"]
    """
    flags = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags.append(f"--{flag}={json.dumps(value) if isinstance(value, dict) else value}")
    return flags


def environment(config: VLLMEngine, *, on_cpu: bool, in_process: bool) -> dict[str, str]:
    """Environment variables that vLLM reads, for this process (before vLLM is imported) or for a server."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the sampler that `extension` widens is the first runner's
    }
    if in_process:
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if on_cpu:
        variables["VLLM_CPU_KVCACHE_SPACE"] = str(config.cpu_cache_gib)
        # It would pin this process's threads, the trainer's among them, to cores of its choice.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return variables


def sampling_options(
    sampling: SamplingConfig, end_token_ids: Collection[int], *, room_tokens: int, stream: tuple[int, ...]
) -> dict[str, Any]:
    """Arguments of vLLM's SamplingParams, by the same names in a server's request body.

    `room_tokens`: what the context leaves after the prompt. A greedy request (temperature 0) is not truncated.
    """
    greedy = sampling.temperature == 0
    options: dict[str, Any] = {
        "temperature": sampling.temperature,
        "max_tokens": min(sampling.max_new_tokens, room_tokens),
        # All end tokens are stated, so vLLM's own guess of them is switched off.
        "ignore_eos": True,
        "stop_token_ids": sorted(end_token_ids),
        "logprobs": ALL_KEPT if sampling.truncated and not greedy else 0,
        "seed": request_seed(stream),
        "skip_special_tokens": False,
    }
    if not greedy:
        options |= {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
    if sampling.stop:
        options |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
    return options


def request_seed(stream: tuple[int, ...]) -> int:
    """A request's own seed, 63 bits, from the name of its random stream.

    Those of a group's completions, whose streams differ in their last number, follow each other: so vLLM seeds the
    completions of one request for several (`n`), and a group may be asked for in one or in many."""
    return int(raw_stream(1, "sample", *stream[:-1])[0] >> 2) + stream[-1]
