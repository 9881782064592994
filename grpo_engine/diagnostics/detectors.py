"""Detectors: turn one step's metrics into findings, each told once. Torch-free.

A finding is news when an episode begins, when it gets worse, and when it is over; in between the detector is silent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from grpo_engine.config import DetectorsConfig
from grpo_engine.diagnostics.signs import (
    EntropyCollapse,
    FlatReward,
    NonFinite,
    Reading,
    RewardRange,
    Severity,
    Sign,
    Truncation,
    ZeroVariance,
)

STEPS_TO_RESOLVE = 5
"""Good steps in a row after which an episode is over."""
_RANK: dict[Severity, int] = {"info": 0, "warning": 1, "critical": 2}


@dataclass(frozen=True, slots=True)
class FindingFields:
    """The payload of the journal's `finding` event."""

    step: int
    detector: str
    severity: Severity
    onset_step: int
    title: str
    evidence: str
    remedy: str
    resolved: bool = False

    def fields(self) -> dict[str, Any]:
        """`journal.append("finding", stage=..., **finding.fields())`."""
        return asdict(self)


@dataclass(slots=True)
class Episode:
    """How long a sign has been bad, and what was told about it."""

    bad_since: int | None = None
    bad_steps: int = 0
    good_steps: int = 0
    told: Severity | None = None
    """Severity of the last finding told; None outside an episode."""
    onset_step: int = 0
    title: str = ""
    remedy: str = ""


class Detectors:
    """The five detectors of a stage. `update` once a step with the step's metrics; state() goes into the checkpoint."""

    def __init__(self, config: DetectorsConfig, *, highest_reward: float, lowest_reward: float = 0.0) -> None:
        rewards = RewardRange(lowest_reward, highest_reward)
        self._signs: list[Sign] = [
            NonFinite(),
            ZeroVariance(config, rewards),
            EntropyCollapse(config),
            Truncation(config),
            FlatReward(config, rewards),
        ]
        self._episodes = {sign.name: Episode() for sign in self._signs}

    def update(self, step: int, values: Mapping[str, float]) -> list[FindingFields]:
        """The findings that are new at `step`; usually none."""
        findings = []
        for sign in self._signs:
            reading = sign.read(step, values)
            finding = _follow(self._episodes[sign.name], sign, step, reading) if reading else None
            if finding:
                findings.append(finding)
        return findings

    def state(self) -> dict[str, Any]:
        """JSON values from which `restore` continues exactly."""
        return {
            sign.name: {"memory": dict(sign.memory), "episode": asdict(self._episodes[sign.name])}
            for sign in self._signs
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`; a detector that is not in it starts fresh."""
        for sign in self._signs:
            if sign.name in state:
                sign.memory = dict(state[sign.name]["memory"])
                self._episodes[sign.name] = Episode(**state[sign.name]["episode"])


def _follow(episode: Episode, sign: Sign, step: int, reading: Reading) -> FindingFields | None:
    """Move the episode on by one step; the finding when there is news."""
    if reading.severity is None:
        return _good_step(episode, sign.name, step)
    if episode.bad_since is None:
        episode.bad_since = step
    episode.bad_steps, episode.good_steps = episode.bad_steps + 1, 0
    if episode.bad_steps < sign.needed_steps:
        return None
    if episode.told is not None and _RANK[reading.severity] <= _RANK[episode.told]:
        return None
    if episode.told is None:
        episode.onset_step = reading.onset_step if reading.onset_step is not None else episode.bad_since
    episode.told, episode.title, episode.remedy = reading.severity, reading.title, reading.remedy
    return FindingFields(
        step, sign.name, reading.severity, episode.onset_step, reading.title, reading.evidence, reading.remedy
    )


def _good_step(episode: Episode, name: str, step: int) -> FindingFields | None:
    episode.bad_since, episode.bad_steps = None, 0
    episode.good_steps += 1
    if episode.told is None or episode.good_steps < STEPS_TO_RESOLVE:
        return None
    evidence = f"The last {STEPS_TO_RESOLVE} steps were clear of it."
    finding = FindingFields(step, name, "info", episode.onset_step, episode.title, evidence, episode.remedy, True)
    episode.told = None
    return finding
