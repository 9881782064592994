"""Self-tests: what the engine checked before each stage of training, and what it found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.models import Attempt, Run, SelfTestRow

LABELS = {
    "on_policy_ratio": "On-policy ratio",
    "gradient_invariance": "Gradient invariance",
    "sampler_and_trainer_agree": "Sampler against trainer",
    "chat_template_prefix": "Chat template",
    "special_tokens": "Special tokens",
    "end_tokens": "End tokens",
}


@dataclass(frozen=True, slots=True)
class SelfTestView:
    row: SelfTestRow
    attempt: int


@dataclass(frozen=True)
class CheckLine:
    label: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class StageChecks:
    """The checks of one start of a stage."""

    attempt: int
    stage: str
    checks: list[CheckLine]

    @property
    def failed(self) -> list[CheckLine]:
        return [check for check in self.checks if not check.passed]


@dataclass(frozen=True)
class SelfTestCard:
    summary: str
    """Example: "all 6 passed"."""
    tone: str
    """good, bad, or empty before the first."""
    stages: list[StageChecks]
    """Newest attempt only, in the order of training."""
    is_off: bool


def list_self_tests(session: Session, run: Run) -> list[SelfTestView]:
    """Every check with its attempt's number, in the order of training."""
    query = select(SelfTestRow, Attempt.number).join(Attempt, Attempt.id == SelfTestRow.attempt_id)
    rows = session.execute(query.where(Attempt.run_id == run.id).order_by(Attempt.number, SelfTestRow.seq))
    return [SelfTestView(row, number) for row, number in rows]


def self_test_card(session: Session, run: Run) -> SelfTestCard:
    """What the newest attempt that tested itself found."""
    views = list_self_tests(session, run)
    newest = [view for view in views if view.attempt == views[-1].attempt]
    stages = [
        StageChecks(attempt, stage, [_line(view.row) for view in members])
        for (attempt, stage), members in groupby(newest, key=lambda view: (view.attempt, view.row.stage))
    ]
    summary, tone = _summary(stages)
    return SelfTestCard(summary, tone, stages, is_off=run.config.get("self_test") == "off")


def _line(row: SelfTestRow) -> CheckLine:
    return CheckLine(check_label(row.name), row.passed, row.detail)


def check_label(name: str) -> str:
    """Example: check_label("end_tokens") == "End tokens"."""
    return LABELS.get(name, name.replace("_", " ").capitalize())


def _summary(stages: Sequence[StageChecks]) -> tuple[str, str]:
    count, failed = sum(len(stage.checks) for stage in stages), sum(len(stage.failed) for stage in stages)
    if not count:
        return "", ""
    return (f"{failed} of {count} failed", "bad") if failed else (f"all {count} passed", "good")
