"""Which servers a rank samples with: its own, or its share of those given by address. Needs no vLLM.

Of as many addresses as ranks or more, each rank has some to itself. Of fewer, several ranks share a server, and the
first of them gives it the weights.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import torch

from grpo_engine.config_rollout import VLLMServerRollout
from grpo_engine.errors import RolloutUnavailable
from grpo_engine.rollout.vllm import options
from grpo_engine.rollout.vllm.client import UNIX, ServerClient
from grpo_engine.rollout.vllm.members import Member
from grpo_engine.rollout.vllm.servers import ServerGroup, serve_command, serve_environment


def start_group(
    config: VLLMServerRollout, folder: Path, *, log_folder: Path, dtype: str, device: torch.device,
    max_context_tokens: int, seed: int, rank: int,
) -> ServerGroup:  # fmt: skip
    """`config.num_servers` servers on the model in `folder`, all on `device`. RolloutUnavailable without vLLM."""
    options.require_vllm()
    on_cpu = device.type == "cpu"
    engine = options.engine_options(
        config, folder, dtype=dtype, max_context_tokens=max_context_tokens, on_cpu=on_cpu, seed=seed
    )
    threads = max(1, torch.get_num_threads() // config.num_servers)  # the trainer's rest while they sample
    variables = options.environment(config, on_cpu=on_cpu, in_process=False)
    variables |= serve_environment(threads, None if on_cpu else device.index or 0)
    engine["disable_uvicorn_access_log"] = True  # a line for every look at its health
    command = serve_command(options.server_arguments(engine))
    name = f"vllm-rank{rank}" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "vllm"
    return ServerGroup([command] * config.num_servers, log_folder=log_folder, name=name, env=variables)


def own_members(group: ServerGroup) -> list[Member]:
    return [Member(ServerClient(process.address), process) for process in group.processes]


def given_members(config: VLLMServerRollout, *, rank: int, num_ranks: int) -> list[Member]:
    """This rank's share of `config.addresses`. Raises RolloutUnavailable when a server could not read the weights."""
    for address in config.addresses:
        if config.weights_folder is None and not _is_here(address):
            raise RolloutUnavailable(
                f"the server {address} is on another host; set rollout.weights_folder to a folder that it sees under "
                "the same path"
            )
    return [
        Member(ServerClient(address), ours_to_update=ours)
        for address, ours in share_of(config.addresses, rank=rank, num_ranks=num_ranks)
    ]


def share_of(addresses: Sequence[str], *, rank: int, num_ranks: int) -> list[tuple[str, bool]]:
    """A rank's addresses, and whether it is the one to update them.

    Example: share_of(["a", "b"], rank=2, num_ranks=3) == [("a", False)]
    """
    if len(addresses) >= num_ranks:
        return [(address, True) for address in addresses[rank::num_ranks]]
    return [(addresses[rank % len(addresses)], rank < len(addresses))]


def _is_here(address: str) -> bool:
    host = urlsplit(address).hostname or ""
    if host == "localhost" or address.startswith(UNIX):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
