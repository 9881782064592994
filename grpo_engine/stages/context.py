"""What every stage works with: its place in the run, the journal, and how a checkpoint is written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from grpo_engine.config import RLStage, RunConfig
from grpo_engine.control import SharedControl
from grpo_engine.events import Journal, boot_clock_s
from grpo_engine.protocols import Communicator
from grpo_engine.rollout_files import batch_name
from grpo_engine.types import StageProgress

Outcome = Literal["finished", "early_stopped", "stopped"]
"""finished: all steps done; early_stopped: the rule ended the stage; stopped: SIGTERM, resumable."""

log = logging.getLogger("cohort")


@dataclass(slots=True)
class SavedCheckpoint:
    path: Path
    bytes: int
    sha256: str


@dataclass(slots=True)
class StageContext:
    """One stage of one attempt, on one rank. Every rank goes the same way; rank 0 alone writes."""

    config: RunConfig
    key: str
    """Such as `1-rl`."""
    folder: Path
    """The attempt's directory."""
    journal: Journal
    control: SharedControl
    communicator: Communicator
    progress: StageProgress
    save: Callable[[Path, dict[str, float]], SavedCheckpoint]
    """Writes the whole state into a folder; metrics go into its manifest. Collective."""
    prune: Callable[[Collection[Path]], list[Path]]
    """Removes checkpoints that retention no longer keeps, but never the given ones; returns their folders."""
    latest_metrics: dict[str, float] = field(default_factory=dict)
    """Newest evaluation and reward, for checkpoints."""
    saved_step: int = -1
    """Step of the newest checkpoint, the resumed one included; -1 when there is none."""
    last_good: Path | None = None
    """Newest checkpoint that the guards found sound, or the stage's first: what a rollback restores."""
    unproven: Path | None = None
    """Newest checkpoint until the guards have seen the step after it, where an explosion shows."""
    best: Path | None = None
    """Checkpoint of the best evaluation in this attempt."""
    best_accuracy: float = 0.0

    @property
    def writes(self) -> bool:
        return self.communicator.rank == 0

    @property
    def num_steps(self) -> int:
        return self.config.stages[self.progress.stage_index].num_steps

    def start(self) -> None:
        """Journal where the stage begins."""
        self.journal.append("stage_started", stage=self.key, step=self.progress.step, num_steps=self.num_steps)

    def promise(self, seconds: float, doing: str) -> None:
        """Tell the watchers that the next event may take this long."""
        self.journal.append("heartbeat", stage=self.key, next_within_s=seconds, doing=doing)

    def warn(self, message: str) -> None:
        """Something people should know that ends nothing."""
        self.journal.append("warning", stage=self.key, message=message)
        log.warning("%s", message)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.journal.metrics(step, values, stage=self.key)

    def trained(self, applied: bool, started_boot_s: float, **about: Any) -> None:
        """Journal the optimizer step just done."""
        self.journal.append(
            "trained",
            stage=self.key,
            step=self.progress.step,
            applied=applied,
            started_boot_s=started_boot_s,
            ended_boot_s=boot_clock_s(),
            **about,
        )

    def rollout_path(self, batch: int) -> tuple[Path, str]:
        """Where a batch's file goes, absolute and relative to the attempt's directory."""
        relative = f"rollouts/{batch_name(batch)}"
        return self.folder / relative, relative

    def checkpoint(self, *, good: bool = True) -> None:
        """Save the present step unless it is saved already, then drop what retention no longer keeps.

        `good`: training was on the rails; the last good checkpoint and the best one are never dropped."""
        step = self.progress.step
        if step == self.saved_step:
            return
        self.control.wait_until_allowed()
        self.promise(300, "writing a checkpoint")
        name = f"checkpoints/{self.key}-{step:06d}"
        saved = self.save(self.folder / name, dict(self.latest_metrics))
        self.saved_step = step
        self._remember(saved.path, good)
        self.journal.append(
            "checkpoint", stage=self.key, step=step, path=name, bytes=saved.bytes, sha256=saved.sha256,
            metrics=dict(self.latest_metrics),
        )  # fmt: skip
        for folder in self.prune([path for path in (self.last_good, self.best) if path]) if self.writes else []:
            removed = int(folder.name.rsplit("-", 1)[1])
            path = f"checkpoints/{folder.name}"
            self.journal.append("checkpoint_removed", stage=self.key, step=removed, path=path)

    def _remember(self, path: Path, good: bool) -> None:
        self.unproven = path if good else None
        if self.last_good is None or not self._is_guarded:
            self.prove()
        accuracy = self.latest_metrics.get("accuracy_greedy", 0.0)
        if accuracy > self.best_accuracy:
            self.best, self.best_accuracy = path, accuracy

    @property
    def _is_guarded(self) -> bool:
        stage = self.config.stages[self.progress.stage_index]
        return isinstance(stage, RLStage) and stage.guards.action != "off"

    def prove(self) -> None:
        """Training went on from the newest checkpoint without an alarm."""
        self.last_good, self.unproven = self.unproven or self.last_good, None

    def end(self, outcome: Outcome, *, good: bool = True) -> Outcome:
        """Save the last state, marked done unless the stage was stopped. Loops leave their final step to this."""
        self.progress.done = outcome != "stopped"
        self.checkpoint(good=good)
        return outcome


def crossed(before: int, after: int, every: int) -> bool:
    """True when a multiple of `every` lies in (before, after]: batches may take several steps."""
    return after // every > before // every
