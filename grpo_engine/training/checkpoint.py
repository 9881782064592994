"""Checkpoints: a folder that AutoModelForCausalLM.from_pretrained loads, with what training needs in `trainer/`.

    1-rl-000040/
    ├── model.safetensors, config.json, generation_config.json, tokenizer files, README.md
    ├── trainer/  masters.safetensors, optimizer.safetensors, learner.json, state.json, rng.json, rng-1.json …, value/,
    │             mtp/
    └── manifest.json

With a LoRA adapter the root has all of this but weights, and `trainer/adapter/` holds the adapter in peft's format; the
manifest names the base and its hash, and `cohort checkpoint merge` makes a folder with weights.

Written aside as `<name>.tmp`, every file and directory fsynced, then renamed: a kill leaves either the whole checkpoint
or a `.tmp` that the next save removes. Resume reads the masters in `trainer/`, so nothing depends on the root's bytes.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedModel

from grpo_engine.config import FolderModel, RunConfig
from grpo_engine.errors import CheckpointInvalid, StorageFull
from grpo_engine.manifest import MANIFEST_NAME, AdapterBase, Manifest, list_files, write_manifest
from grpo_engine.model.adapters import base_hash, has_adapter, write_adapter_config
from grpo_engine.model.loading import Policy
from grpo_engine.protocols import Learner
from grpo_engine.provenance import git_commit, package_versions
from grpo_engine.training import rng as rng_state
from grpo_engine.training.model_card import model_card
from grpo_engine.types import StageProgress

TRAINER, ADAPTER, STATE, ASIDE = "trainer", "adapter", "state.json", ".tmp"


def checkpoint_name(stage: str, step: int) -> str:
    """Example: checkpoint_name("1-rl", 40) == "1-rl-000040"."""
    return f"{stage}-{step:06d}"


def save_checkpoint(
    folder: Path,
    *,
    policy: Policy,
    learner: Learner,
    progress: StageProgress,
    stage: str,
    config: RunConfig,
    parent: str | None,
    metrics: Mapping[str, float],
    reward_versions: Mapping[str, str],
    data_versions: Mapping[str, str] | None = None,
    extra_files: Mapping[str, Path] | None = None,
    rng_states: Sequence[Mapping[str, Any]] | None = None,
) -> Manifest:
    """Write a whole checkpoint to `folder`, replacing one of the same name.

    `extra_files` (name -> file) are copied into `trainer/`, such as the reference a stage measures KL against.
    `rng_states` are what `rng.capture` gave on each rank, in rank order; None = this process is the only rank.
    Raises StorageFull, leaving nothing behind, when the disk is full or cannot be written."""
    aside = folder.with_name(folder.name + ASIDE)
    versions = {"data_versions": dict(data_versions or {}), "reward_versions": dict(reward_versions)}
    manifest = _manifest(policy, progress, config, metrics, stage=stage, parent=parent, **versions)
    states = [rng_state.capture()] if rng_states is None else rng_states
    try:
        _remove_leftovers(folder.parent)
        (aside / TRAINER).mkdir(parents=True)
        _write_model(aside, policy)
        _write_trainer(aside / TRAINER, learner, progress, extra_files or {}, states)
        (aside / "README.md").write_text(model_card(config, manifest), encoding="utf-8")
        return _finish(aside, folder, manifest)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise StorageFull(f"the checkpoint {folder} cannot be written: {error}; free space or move the home") from error


def _manifest(
    policy: Policy, progress: StageProgress, config: RunConfig, metrics: Mapping[str, float], **told: Any
) -> Manifest:
    """All but the files."""
    return Manifest(
        step=progress.step,
        policy_version=progress.policy_version,
        created_at=datetime.now(UTC),
        config_hash=config.hash(),
        git_commit=git_commit(),
        package_versions=package_versions(),
        adapter=_adapter_base(policy, config),
        metrics={name: value if math.isfinite(value) else None for name, value in metrics.items()},
        files={},
        **told,
    )


def _finish(aside: Path, folder: Path, manifest: Manifest) -> Manifest:
    """List the files, make them durable and give them their name."""
    manifest = manifest.model_copy(update={"files": list_files(aside)})
    write_manifest(aside, manifest)
    sync_tree(aside)
    _put_in_place(aside, folder)
    return manifest


def _write_model(folder: Path, policy: Policy) -> None:
    """The root: model and tokenizer; without weights where only an adapter is trained."""
    policy.tokenizer.save_pretrained(folder)
    if not has_adapter(policy.model):
        policy.model.save_pretrained(folder)
        return
    _write_model_config(folder, policy.model)
    write_adapter_config(folder / TRAINER / ADAPTER, policy.model)  # its tensors come with the learner


def _write_model_config(folder: Path, model: PreTrainedModel) -> None:
    """What `model.save_pretrained` writes besides the weights."""
    model.config.architectures = [type(model).__name__]
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def _adapter_base(policy: Policy, config: RunConfig) -> AdapterBase | None:
    if not has_adapter(policy.model):
        return None
    base = config.model.path if isinstance(config.model, FolderModel) else config.model.source
    digest = policy.base_sha256 or base_hash(policy.model)
    return AdapterBase(base=base, base_sha256=digest, model=config.model, seed=config.seed)


def _write_trainer(
    trainer: Path,
    learner: Learner,
    progress: StageProgress,
    extra_files: Mapping[str, Path],
    rng_states: Sequence[Mapping[str, Any]],
) -> None:
    """What training needs to go on: learner, place, random state of each rank, and files that belong to the stage."""
    learner.save(trainer)
    _write_json(trainer / STATE, asdict(progress))
    for name, source in extra_files.items():
        shutil.copyfile(source, trainer / name)
    for rank, state in enumerate(rng_states):
        _write_json(trainer / _rng_name(rank), state)


def _rng_name(rank: int) -> str:
    return f"rng-{rank}.json" if rank else "rng.json"


def load_progress(folder: Path, *, rng: bool = False) -> StageProgress:
    """Where the stage was; with `rng` also sets the random state of every library, as on rank 0. Verify before.

    Raises CheckpointInvalid when a file is missing or unreadable."""
    try:
        progress = StageProgress(**json.loads((folder / TRAINER / STATE).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointInvalid(f"{folder / TRAINER / STATE} cannot be read: {error}") from error
    if rng:
        restore_rng(folder)
    return progress


def restore_rng(folder: Path, rank: int = 0) -> None:
    """Raises CheckpointInvalid when the checkpoint holds no usable random state of that rank."""
    path = folder / TRAINER / _rng_name(rank)
    try:
        rng_state.restore(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointInvalid(f"{path} cannot be restored: {error}") from error


def remove_old(folder: Path, keep_last: int, stage: str, protected: Collection[Path] = ()) -> list[Path]:
    """Remove all but the newest `keep_last` (at least 1) checkpoints of `stage` in `folder`; returns those removed.

    `protected` ones stay too, such as the last good one before an alarm."""
    _remove_leftovers(folder)
    pattern = re.compile(re.escape(stage) + r"-(\d{6,})")
    steps = {
        int(match[1]): path
        for path in folder.iterdir()
        if (match := pattern.fullmatch(path.name)) and (path / MANIFEST_NAME).is_file()
    }
    old = [steps[step] for step in sorted(steps)[: -max(1, keep_last)]]
    removed = [path for path in old if path not in protected]
    for path in removed:
        # Renamed first, so that a kill in between leaves no half checkpoint under a good name.
        doomed = path.with_name(path.name + ASIDE)
        path.rename(doomed)
        shutil.rmtree(doomed)
    return removed


def _remove_leftovers(folder: Path) -> None:
    for leftover in folder.glob("*" + ASIDE):
        shutil.rmtree(leftover)


def _put_in_place(aside: Path, folder: Path) -> None:
    if folder.exists():
        old = folder.with_name(folder.name + ".old" + ASIDE)
        folder.rename(old)
        aside.rename(folder)
        shutil.rmtree(old)
    else:
        aside.rename(folder)
    _sync(folder.parent)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value) + "\n", encoding="utf-8")


def sync_tree(folder: Path) -> None:
    """fsync every file and directory of it."""
    for directory, _, names in os.walk(folder, topdown=False):
        for name in names:
            _sync(Path(directory) / name)
        _sync(Path(directory))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
