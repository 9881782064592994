"""One attempt: what it carries from stage to stage, and where it begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from grpo_engine.config import RunConfig
from grpo_engine.control import SharedControl
from grpo_engine.errors import CheckpointInvalid, InvalidConfig, Problem
from grpo_engine.events import Journal
from grpo_engine.manifest import Manifest, verify
from grpo_engine.protocols import Communicator
from grpo_engine.training.checkpoint import load_progress
from grpo_engine.types import StageProgress


@dataclass(slots=True)
class Attempt:
    """What one attempt carries from stage to stage, on one rank."""

    config: RunConfig
    folder: Path
    resume: Path | None
    """Checkpoint to go on from."""
    forked: bool
    """The checkpoint is another run's: its config differs, and this run is judged afresh."""
    custom_sources: Mapping[str, str]
    """Custom reward name -> source text."""
    control: SharedControl
    communicator: Communicator
    journal: Journal
    parent: str | None = None
    """Checkpoint before the next one to be written, as a path."""
    data_versions: dict[str, str] = field(default_factory=dict)
    """Stage, such as `1-rl` -> version of what it reads, for the stages that this attempt trained."""
    reward_versions: dict[str, str] = field(default_factory=dict)


def starting_progress(attempt: Attempt) -> StageProgress:
    """Where training begins: the first stage, or the place of the verified checkpoint.

    Raises InvalidConfig when the config does not fit, CheckpointInvalid when the checkpoint cannot be used."""
    if attempt.resume is None:
        return StageProgress(stage_index=0)
    manifest = verify(attempt.resume)
    progress = load_progress(attempt.resume)
    if attempt.forked:
        return _forked_progress(attempt.config, manifest, progress)
    if manifest.config_hash != attempt.config.hash():
        raise CheckpointInvalid(
            f"{attempt.resume} was written by config {manifest.config_hash[:12]}, not {attempt.config.hash()[:12]}; "
            "fork it to go on under other settings"
        )
    return progress


def _forked_progress(config: RunConfig, manifest: Manifest, progress: StageProgress) -> StageProgress:
    """The checkpoint's place in this run's recipe; early stopping and detectors begin anew."""
    index = progress.stage_index
    if index >= len(config.stages) or config.stage_key(index) != manifest.stage:
        found = config.stage_key(index) if index < len(config.stages) else "missing"
        message, remedy = f"the checkpoint lies in stage {manifest.stage}", "keep the kinds of the stages up to it"
        raise InvalidConfig([Problem(f"stages.{index}", found, message, remedy)])
    done = progress.step >= config.stages[index].num_steps
    return replace(progress, early_stopping={}, detectors={}, guards={}, smoothed_reward=None, done=done)
