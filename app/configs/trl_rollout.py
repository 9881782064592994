"""Where a TRL config samples: TRL's vLLM becomes a rollout backend, transformers' generate our own decoder."""

from __future__ import annotations

from typing import Any

from app.configs.trl_source import TrlSource

COLOCATED = ("vllm_enable_sleep_mode", "vllm_gpu_memory_utilization", "vllm_max_model_length")
"""What TRL reads when vLLM runs in its own process."""
SERVED = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port")
"""What TRL reads when vLLM is a server."""


def rollout(trl: TrlSource) -> dict[str, Any]:
    """Raises ValueError for a mode that TRL does not have."""
    if not trl["use_vllm"]:
        trl.say_if_given("has no effect without use_vllm", "vllm_mode", *COLOCATED, *SERVED)
        return {"backend": "torch"}
    trl.say("use_vllm", "vLLM is installed apart, by make install-vllm")
    match trl["vllm_mode"]:
        case "colocate":
            return _in_process(trl)
        case "server":
            return _server(trl)
    raise ValueError(f"vllm_mode = {trl['vllm_mode']} is not one of colocate, server")


def _in_process(trl: TrlSource) -> dict[str, Any]:
    trl.say_if_given("has no effect in vllm_mode colocate", *SERVED)
    length = trl["vllm_max_model_length"]
    return {
        "backend": "vllm",
        "sleep": bool(trl["vllm_enable_sleep_mode"]),
        "memory_share": trl.number("vllm_gpu_memory_utilization"),
        "max_model_len": None if length is None else trl.whole("vllm_max_model_length"),
    }


def _server(trl: TrlSource) -> dict[str, Any]:
    trl.say_if_given("is chosen where the server is started, in TRL and here", *COLOCATED)
    address = trl["vllm_server_base_url"]
    if address is None:
        host = "127.0.0.1" if trl["vllm_server_host"] == "0.0.0.0" else trl["vllm_server_host"]
        address = f"http://{host}:{trl.whole('vllm_server_port')}"
    else:
        trl.say_if_given("vllm_server_base_url decides", "vllm_server_host", "vllm_server_port")
    trl.say(
        "vllm_mode",
        "TRL talks to trl vllm-serve; here the address is vLLM's own server, started as docs/rollout.md says, and an "
        "empty rollout.addresses has each rank start one",
    )
    return {"backend": "vllm_server", "addresses": [str(address)]}
