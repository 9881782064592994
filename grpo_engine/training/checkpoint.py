"""Checkpoints: a folder that AutoModelForCausalLM.from_pretrained loads, with what training needs in `trainer/`.

    1-rl-000040/
    ├── model.safetensors, config.json, generation_config.json, tokenizer files, README.md
    ├── trainer/  masters.safetensors, optimizer.safetensors, learner.json, state.json, rng.json
    └── manifest.json

Written aside as `<name>.tmp`, every file and directory fsynced, then renamed: a kill leaves either the whole checkpoint
or a `.tmp` that the next save removes. Resume reads the masters in `trainer/`, so nothing depends on the root's bytes.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from safetensors import SafetensorError

from grpo_engine.config import RunConfig
from grpo_engine.errors import CheckpointInvalid, StorageFull
from grpo_engine.manifest import MANIFEST_NAME, Manifest, list_files, write_manifest
from grpo_engine.model.loading import Policy
from grpo_engine.protocols import Learner
from grpo_engine.provenance import git_commit, package_versions
from grpo_engine.training import rng as rng_state
from grpo_engine.training.model_card import model_card
from grpo_engine.types import StageProgress

TRAINER, STATE, RNG, ASIDE = "trainer", "state.json", "rng.json", ".tmp"


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
    rng: bool = True,
) -> Manifest:
    """Write a whole checkpoint to `folder`, replacing one of the same name.

    `extra_files` (name -> file) are copied into `trainer/`, such as the reference a stage measures KL against.
    Raises StorageFull, leaving nothing behind, when the disk is full or cannot be written."""
    aside = folder.with_name(folder.name + ASIDE)
    try:
        _remove_leftovers(folder.parent)
        (aside / TRAINER).mkdir(parents=True)
        policy.model.save_pretrained(aside)
        policy.tokenizer.save_pretrained(aside)
        _write_trainer(aside / TRAINER, learner, progress, extra_files or {}, rng=rng)
        manifest = Manifest(
            stage=stage,
            step=progress.step,
            policy_version=progress.policy_version,
            created_at=datetime.now(UTC),
            config_hash=config.hash(),
            parent=parent,
            data_versions=dict(data_versions or {}),
            reward_versions=dict(reward_versions),
            git_commit=git_commit(),
            package_versions=package_versions(),
            metrics={name: value if math.isfinite(value) else None for name, value in metrics.items()},
            files={},
        )
        (aside / "README.md").write_text(model_card(config, manifest), encoding="utf-8")
        manifest = manifest.model_copy(update={"files": list_files(aside)})
        write_manifest(aside, manifest)
        _sync_tree(aside)
        _put_in_place(aside, folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise StorageFull(f"the checkpoint {folder} cannot be written: {error}; free space or move the home") from error
    return manifest


def _write_trainer(
    trainer: Path, learner: Learner, progress: StageProgress, extra_files: Mapping[str, Path], *, rng: bool
) -> None:
    """What training needs to go on: learner, place, random state, and files that belong to the stage."""
    learner.save(trainer)
    _write_json(trainer / STATE, asdict(progress))
    for name, source in extra_files.items():
        shutil.copyfile(source, trainer / name)
    if rng:
        _write_json(trainer / RNG, rng_state.capture())


def load_progress(folder: Path, *, rng: bool = False) -> StageProgress:
    """Where the stage was; with `rng` also sets the random state of every library. Verify the folder before.

    Raises CheckpointInvalid when a file is missing or unreadable."""
    try:
        progress = StageProgress(**json.loads((folder / TRAINER / STATE).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointInvalid(f"{folder / TRAINER / STATE} cannot be read: {error}") from error
    if rng:
        restore_rng(folder)
    return progress


def restore_rng(folder: Path) -> None:
    """Raises CheckpointInvalid when the checkpoint holds no usable random state."""
    try:
        rng_state.restore(json.loads((folder / TRAINER / RNG).read_bytes()))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointInvalid(f"{folder / TRAINER / RNG} cannot be restored: {error}") from error


def remove_old(folder: Path, keep_last: int, stage: str) -> list[Path]:
    """Remove all but the newest `keep_last` (at least 1) checkpoints of `stage` in `folder`; returns those removed."""
    _remove_leftovers(folder)
    pattern = re.compile(re.escape(stage) + r"-(\d{6,})")
    steps = {
        int(match[1]): path
        for path in folder.iterdir()
        if (match := pattern.fullmatch(path.name)) and (path / MANIFEST_NAME).is_file()
    }
    removed = [steps[step] for step in sorted(steps)[: -max(1, keep_last)]]
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


def _sync_tree(folder: Path) -> None:
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
