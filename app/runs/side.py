"""What stands beside the charts: what asks for a decision (early stopping, findings, the best and the worst
completion), and how completions are sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.artifacts import ArtifactStore
from app.errors import AppError
from app.findings.service import list_findings
from app.formatting import MISSING, percent
from app.metrics.display import newest_values
from app.models import Attempt, FindingRow, RolloutBatch, Run
from app.rollouts import files
from app.rollouts import service as rollouts
from app.rollouts.batches import BatchView, batch_view
from app.rollouts.views import Segment, segments
from app.runs import service
from app.runs.rollout_card import RolloutCard, rollout_card
from app.runs.self_tests import SelfTestCard, self_test_card
from app.runs.states import TERMINAL_STATES

MODE_WORDS = {"off": "off", "observe": "observes only", "stop": "may stop the run"}
BUTTONS = {"stop": "Let it stop the run", "observe": "Observe only", "off": "Off"}
RULES = {"literal": "literal", "plateau": "plateau, by evidence"}
SEVERITY_WORDS = {"info": "Note", "warning": "Warning", "critical": "Critical"}
SEVERITY_TONES = {"info": "run", "warning": "warn", "critical": "bad"}
DETECTOR_WORDS = {
    "guard_kl": "guard: KL",
    "guard_nonfinite": "guard: non-finite",
    "guard_reward": "guard: reward",
    "guard_spike": "guard: spike",
}
"""Detector -> what people call it, where that is not its name with spaces."""
MAX_FINDINGS = 4


@dataclass(frozen=True)
class EarlyStoppingView:
    mode: str
    mode_text: str
    rule: str
    known: bool
    """False before the first step of a reinforcement-learning stage."""
    armed_text: str
    smoothed_reward: float | None
    improvement_text: str
    span_text: str
    threshold: float
    patience: int
    patience_left: int
    would_stop: bool
    can_override: bool
    buttons: list[tuple[str, str]]


@dataclass(frozen=True)
class FindingLine:
    title: str
    detector: str
    """In words."""
    severity: str
    severity_word: str
    tone: str
    state: str
    step: int
    onset_step: int
    evidence: str
    remedy: str
    step_url: str
    at: datetime


@dataclass(frozen=True)
class Sample:
    href: str
    prompt: str
    gold: str | None
    advantage: float
    tone: str
    segments: list[Segment]


@dataclass(frozen=True)
class Samples:
    step: int
    items: list[Sample]


@dataclass(frozen=True)
class Side:
    early_stopping: EarlyStoppingView | None
    self_test: SelfTestCard
    findings: list[FindingLine]
    num_open: int
    samples: Samples | None
    rollout: RolloutCard | None


def build_side(session: Session, store: ArtifactStore, run: Run, stage: str, *, can_run: bool) -> Side:
    """`stage`: whose figures the page shows."""
    found = finding_lines(session, run)
    num_open = sum(line.state == "open" for line in found)
    shown = sorted(found, key=lambda line: line.state != "open")[:MAX_FINDINGS]
    return Side(
        early_stopping_view(session, run, can_run=can_run),
        self_test_card(session, run),
        shown,
        num_open,
        best_and_worst(session, store, run),
        _rollout(session, run, stage),
    )


def _rollout(session: Session, run: Run, stage: str) -> RolloutCard | None:
    latest = newest_values(session, run, stage, "rollout/") | newest_values(session, run, stage, "mtp/")
    sync = service.newest_event(session, run, "weight_sync")
    return rollout_card(run, stage, latest, sync.payload if sync else None)


# ---------------------------------------------------------------- early stopping
def early_stopping_view(session: Session, run: Run, *, can_run: bool) -> EarlyStoppingView | None:
    """None when no stage of the run has a reward."""
    stages = [stage for stage in run.config["stages"] if stage["kind"] == "rl"]
    if not stages:
        return None
    config: Mapping[str, Any] = stages[-1]["early_stopping"]
    event = service.early_stopping_state(session, run) or {}
    mode = run.early_stopping_override or config["mode"]
    live = run.state not in TERMINAL_STATES
    improvement = event.get("improvement")
    return EarlyStoppingView(
        mode=mode,
        mode_text=MODE_WORDS[mode] + (", set by hand" if run.early_stopping_override else ""),
        rule=RULES.get(config["rule"], config["rule"]),
        known=bool(event),
        armed_text=_armed(event, config),
        smoothed_reward=event.get("smoothed_reward"),
        improvement_text=MISSING if improvement is None else ("+" if improvement > 0 else "") + percent(improvement),
        span_text=" over 5 steps" if config["rule"] == "literal" else f" over {config['window_steps']} steps",
        threshold=event.get("threshold", config["min_improvement"]),
        patience=event.get("patience", config["patience"]),
        patience_left=event.get("patience_left", config["patience"]),
        would_stop=bool(event.get("would_stop")),
        can_override=live and can_run,
        buttons=[(other, label) for other, label in BUTTONS.items() if other != mode],
    )


def _armed(event: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    if event.get("armed"):
        return "yes"
    return f"after {config['warmup_steps']} steps"


# ---------------------------------------------------------------- findings
def finding_lines(session: Session, run: Run) -> list[FindingLine]:
    return [_line(run, view.finding) for view in list_findings(session, run).items]


def _line(run: Run, row: FindingRow) -> FindingLine:
    has_rollouts = row.stage is not None and row.stage.endswith("-rl") and row.step > 0
    return FindingLine(
        title=row.title,
        detector=detector_words(row.detector),
        severity=row.severity,
        severity_word=SEVERITY_WORDS.get(row.severity, row.severity),
        tone=SEVERITY_TONES.get(row.severity, ""),
        state=row.state,
        step=row.step,
        onset_step=row.onset_step,
        evidence=row.evidence,
        remedy=row.remedy,
        step_url=f"/runs/{run.number}/steps/{quote(row.stage or '')}/{row.step}" if has_rollouts else "",
        at=row.at,
    )


def detector_words(name: str) -> str:
    """Example: detector_words("zero_variance") == "zero variance"."""
    return DETECTOR_WORDS.get(name, name.replace("_", " ").replace("/", ": "))


# ---------------------------------------------------------------- best and worst
def best_and_worst(session: Session, store: ArtifactStore, run: Run) -> Samples | None:
    """The highest and the lowest rewarded completion of the newest step that has rollouts; None without them."""
    query = select(RolloutBatch, Attempt.number).join(Attempt, Attempt.id == RolloutBatch.attempt_id)
    query = query.where(Attempt.run_id == run.id, RolloutBatch.step.is_not(None))
    newest = session.execute(query.order_by(Attempt.number.desc(), RolloutBatch.batch.desc()).limit(1)).first()
    if newest is None:
        return None
    batch = batch_view(*newest)
    try:
        rows = files.read_columns(store, batch.key, ["group_index", "completion_index", "reward", "advantage"])
        scored = [row for row in rows if row["reward"] is not None]
        ends = _ends(scored)
        return Samples(batch.step or 0, [_sample(session, store, run, batch, row) for row in ends]) if ends else None
    except AppError:
        return None  # the file is not in the store yet, or retention removed it


def _ends(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    if not rows:
        return []
    order = sorted(rows, key=lambda row: (row["reward"], row["advantage"] or 0.0))
    return [order[-1], order[0]] if len(order) > 1 else [order[0]]


def _sample(session: Session, store: ArtifactStore, run: Run, batch: BatchView, row: Mapping[str, Any]) -> Sample:
    index = row["group_index"]
    group = rollouts.group(session, store, run, batch.attempt, batch.batch, index)
    completion = next(c for c in group.completions if c.index == row["completion_index"])
    advantage = completion.advantage or 0.0
    return Sample(
        href=group_url(run.number, batch.attempt, batch.batch, index) + f"#completion-{completion.index}",
        prompt=group.prompt_text,
        gold=group.gold,
        advantage=advantage,
        tone="good" if advantage > 0 else "bad" if advantage < 0 else "sub",
        segments=segments(completion.text[:600], completion.parts),
    )


def group_url(number: int, attempt: int, batch: int, index: int) -> str:
    return f"/runs/{number}/groups/{attempt}-{batch}-{index}"
