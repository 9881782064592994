"""Whether what samples can start and holds what will be asked of it: vLLM, its servers, its draft heads. Torch-free."""

from __future__ import annotations

import importlib.util
import ipaddress
import json
from pathlib import Path
from urllib.parse import urlsplit

from grpo_engine.checks.model_folder import ModelShape
from grpo_engine.checks.report import Report
from grpo_engine.config import FolderModel, RLStage, RunConfig
from grpo_engine.config_rollout import TorchRollout, VLLMEngine, VLLMRollout, VLLMServerRollout, VLLMSpeculation

HEAD_FIELDS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Fields of a model's config.json that count its own multi-token prediction layers."""


def check_rollout(config: RunConfig, shape: ModelShape | None, report: Report) -> None:
    """After the data was read: `report.data` tells the longest prompts."""
    rollout = config.rollout
    if isinstance(rollout, TorchRollout) or not any(isinstance(stage, RLStage) for stage in config.stages):
        return
    if config.mtp.depth:
        message = f"the heads are trained, but {rollout.backend} does not draft with them"
        report.warn("mtp.depth", config.mtp.depth, message, "set it to 0, or use backend torch with drafts mtp")
    _check_installed(rollout, report)
    if isinstance(rollout, VLLMServerRollout):
        _check_addresses(rollout, report)
    if isinstance(rollout, VLLMRollout) and rollout.sleep and config.needs.device == "cpu":
        report.warn("rollout.sleep", True, "vLLM on a CPU does not sleep", "leave it out, or train on a GPU")
    if config.deterministic:
        message = "vLLM's batches depend on time, so that a resumed run is not bit-exact"
        report.warn("rollout.backend", rollout.backend, message, "use torch, or set deterministic to false")
    _check_length(config, rollout, shape, report)
    if rollout.speculation is not None:
        _check_speculation(config, rollout.speculation, report)


def _check_installed(rollout: VLLMRollout | VLLMServerRollout, report: Report) -> None:
    starts_vllm = not (isinstance(rollout, VLLMServerRollout) and rollout.addresses)
    if starts_vllm and importlib.util.find_spec("vllm") is None:
        remedy = "run `make install-vllm`, or use backend torch, or vllm_server with addresses of running servers"
        report.refuse("rollout.backend", rollout.backend, "vLLM is not installed on this host", remedy)


def _check_addresses(rollout: VLLMServerRollout, report: Report) -> None:
    addresses = rollout.addresses
    for index, address in enumerate(addresses):
        field = f"rollout.addresses.{index}"
        if fault := _fault_of(address):
            report.refuse(field, address, fault, "write it as http://HOST:PORT, such as http://10.0.0.5:8000")
        elif address.rstrip("/") in {other.rstrip("/") for other in addresses[:index]}:
            report.refuse(field, address, "the same server stands here twice", "name each server once")
    far = [address for address in addresses if not _fault_of(address) and not _is_here(address)]
    if far and rollout.weights_folder is None:
        message = f"the server {far[0]} is on another host and cannot read the weights from this one's memory"
        remedy = "name a folder that both hosts see under the same path"
        report.refuse("rollout.weights_folder", "null", message, remedy)


def _is_here(address: str) -> bool:
    host = urlsplit(address).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _fault_of(address: str) -> str:
    """In words what keeps it from being a server's address; empty when nothing does."""
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError as error:
        return f"is no address: {error}"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "is no HTTP address"
    if parts.path.strip("/") or parts.query or parts.fragment:
        return "has more than host and port: paths are added by the engine"
    if parts.username is not None:
        return "holds a user name, which would stand in logs and configs"
    return "has no port" if port is None and parts.scheme == "http" else ""


def _check_length(config: RunConfig, rollout: VLLMEngine, shape: ModelShape | None, report: Report) -> None:
    limit, field = rollout.max_model_len, "rollout.max_model_len"
    if limit is None:
        return
    if shape and limit > shape.max_context_tokens:
        message = f"the model's context is {shape.max_context_tokens} tokens"
        report.refuse(field, limit, message, f"lower it to {shape.max_context_tokens}, or leave it out")
        return
    stages = {config.stage_key(index): stage for index, stage in enumerate(config.stages)}
    for read in report.data:
        stage, prompt = stages[read.stage], read.longest_prompt_tokens
        if not isinstance(stage, RLStage):
            continue
        wanted = prompt + stage.sampling.max_new_tokens
        if prompt >= limit:
            message = f"stage {read.stage} has a prompt of {prompt} tokens, which leaves no room for a completion"
            report.refuse(field, limit, message, f"raise it to {wanted}, or leave it out")
        elif wanted > limit:
            message = f"prompt and completion of stage {read.stage} take up to {wanted} tokens, so completions are cut"
            report.warn(field, limit, message, f"raise it to {wanted}, or lower sampling.max_new_tokens")


def _check_speculation(config: RunConfig, speculation: VLLMSpeculation, report: Report) -> None:
    field = "rollout.speculation"
    if speculation.model is not None and not (Path(speculation.model) / "config.json").is_file():
        remedy = f"give the folder of an {speculation.method} head for this model"
        report.refuse(f"{field}.model", speculation.model, "the folder has no config.json", remedy)
        return
    if speculation.method == "mtp" and not _has_own_heads(config):
        message = "the model has no multi-token prediction layers that vLLM could draft with"
        remedy = "use ngram, or backend torch with drafts mtp, which trains heads of its own"
        report.refuse(f"{field}.method", "mtp", message, remedy)
    elif speculation.method != "ngram":
        message = "its draft weights stay as they are while the policy learns, so that ever fewer drafts are accepted"
        report.warn(f"{field}.method", speculation.method, message, "watch the accepted share, or use ngram")


def _has_own_heads(config: RunConfig) -> bool:
    if not isinstance(config.model, FolderModel):
        return False
    try:
        told = json.loads((Path(config.model.path) / "config.json").read_text(encoding="utf-8"))
        told = told.get("text_config") or told
        return any(int(told.get(name) or 0) > 0 for name in HEAD_FIELDS)
    except (OSError, ValueError, TypeError, AttributeError):
        return True  # whoever looks at the model folder tells what is wrong with it
