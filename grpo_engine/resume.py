"""The policy an attempt starts with: the config's model, or what its checkpoint continues."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from grpo_engine.config import FolderModel, RunConfig
from grpo_engine.config_training import LoraAdapter
from grpo_engine.errors import CheckpointInvalid, InvalidConfig, Problem
from grpo_engine.manifest import Manifest, read_manifest
from grpo_engine.model.adapters import add_adapter, base_hash, read_adapter
from grpo_engine.model.loading import Policy, load_policy
from grpo_engine.model.mtp import MTPHeads
from grpo_engine.training import learner_state
from grpo_engine.training.checkpoint import ADAPTER, TRAINER


def load_policy_for(config: RunConfig, resume: Path | None, device: torch.device) -> Policy:
    """The policy on `device`, float32; the caller's learner then loads the checkpoint's exact tensors into it.

    Training all weights, it is built from the checkpoint's root. With an adapter it is always built from config.model,
    whose weights no checkpoint holds, and must then be the base that the checkpoint's adapter was trained on.
    Raises CheckpointInvalid when it is another base, InvalidConfig when config and checkpoint differ in the adapter."""
    manifest = None if resume is None else read_manifest(resume)
    if not isinstance(config.adapter, LoraAdapter):
        if manifest is not None and manifest.adapter is not None:
            remedy = "set adapter as it was, or model.path to what `cohort checkpoint merge` makes of it"
            raise _other_kind("none", f"{resume} holds an adapter without its base's weights", remedy)
        model = config.model if resume is None else FolderModel(path=str(resume))
        return _with_heads(load_policy(model, seed=config.seed, dtype=config.dtype, device=device), config)
    if resume is not None and manifest is not None:
        _require_same_adapter(config.adapter, manifest, resume)
    policy = load_policy(config.model, seed=config.seed, dtype=config.dtype, device=device)
    digest = base_hash(policy.model)
    if resume is not None and manifest is not None:
        check_base(manifest, digest, _model_name(config), resume)
    add_adapter(policy, config.adapter, config.seed)
    return replace(_with_heads(policy, config), base_sha256=digest)


def _with_heads(policy: Policy, config: RunConfig) -> Policy:
    """The policy with the multi-token prediction heads of `config.mtp`: from the run's seed, or as far as the folder of
    config.model has trained ones, those."""
    if config.mtp.depth == 0:
        return policy
    try:
        heads = MTPHeads(policy.model, config.mtp.depth, config.seed)
    except ValueError as error:
        raise InvalidConfig([Problem("mtp.depth", str(config.mtp.depth), str(error), "set it to 0")]) from error
    if isinstance(config.model, FolderModel):
        learner_state.read_heads(Path(config.model.path) / TRAINER, dict(heads.named_parameters()))
    return replace(policy, mtp=heads)


def check_base(manifest: Manifest, digest: str, name: str, folder: Path) -> None:
    """`digest` is `base_hash` of the model `name`. Raises CheckpointInvalid when the adapter lies on another base."""
    assert manifest.adapter is not None
    expected = manifest.adapter
    if digest != expected.base_sha256:
        raise CheckpointInvalid(
            f"the adapter of {folder} was trained on {expected.base} with SHA-256 {expected.base_sha256}, but {name} "
            f"has {digest}: its weights are others; give the base that it was trained on"
        )


def _require_same_adapter(config: LoraAdapter, manifest: Manifest, folder: Path) -> None:
    if manifest.adapter is None:
        remedy = "set it to none, or start a new run with model.path set to the checkpoint"
        raise _other_kind("lora", f"{folder} holds whole weights and no adapter", remedy)
    saved, _ = read_adapter(folder / TRAINER / ADAPTER)
    for name in ("rank", "alpha"):
        here, there = getattr(config, name), getattr(saved, name)
        if here != there:
            message = f"the adapter of {folder} has {there:g}"
            remedy = f"set it to {there:g}, or merge the checkpoint and start from that"
            raise InvalidConfig([Problem(f"adapter.{name}", f"{here:g}", message, remedy)])


def _other_kind(kind: str, message: str, remedy: str) -> InvalidConfig:
    return InvalidConfig([Problem("adapter.kind", kind, message, remedy)])


def _model_name(config: RunConfig) -> str:
    return config.model.path if isinstance(config.model, FolderModel) else f"{config.model.source} of this config"
