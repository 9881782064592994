"""What the claims of the rollout benchmark share: how large and how often they are measured, their sides and rows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import Side
from benchmarks.results import Row, Spread
from benchmarks.standing import Job


@dataclass(frozen=True, slots=True)
class Setup:
    """How the claims are measured."""

    repetitions: int = 5
    small: bool = False
    """Tiny sizes, to see that everything runs."""
    device: str = "cpu"

    def size(self, whole: int, small: int) -> int:
        return small if self.small else whole


# ---------------------------------------------------------------- sides
def ours(job: Job, name: str = "ours", python: Path | None = None) -> Side:
    """Cohort's sampler of the job's rollout section; vLLM's backends need vLLM's `python`."""
    return Side(name, [str(python or sys.executable), "-m", "benchmarks.sample_ours"], job, {})


def generate(job: Job) -> Side:
    return Side("generate", [sys.executable, "-m", "benchmarks.sample_generate"], {**job, "ends": False}, {})


def raw_vllm(job: Job, python: Path, name: str = "LLM.generate") -> Side:
    return Side(name, [str(python), "-m", "benchmarks.sample_vllm"], job, {})


# ---------------------------------------------------------------- rows
def rates(answers: Sequence[Job]) -> list[float]:
    """Sampled tokens a second, one a repetition."""
    return [answer["tokens"] / answer["seconds"] for answer in answers]


def rate_row(
    claim: str, mine: Sequence[float], theirs: Sequence[float] | None, limit: str, *,
    goal: float | None = None, notes: str = "", unit: str = "sampled tokens/s",
) -> Row:  # fmt: skip
    """Medians of both sides' rates."""
    spread = {"ours": list(mine)} | ({} if theirs is None else {"peer": list(theirs)})
    peer = None if theirs is None else Spread(list(theirs)).median
    return Row(claim, Spread(list(mine)).median, peer, unit, limit, goal=goal, spread=spread, notes=notes)


def worse(claim: str, rows: Sequence[Row], names: Sequence[str]) -> Row:
    """The row with the smallest ratio under the claim's id; the notes tell of the others."""
    ordered = sorted(zip(rows, names, strict=True), key=lambda pair: pair[0].ratio or 0.0)
    (lowest, name), *others = ordered
    told = "; ".join(f"{other}: {row.ours:,.0f} against {row.peer:,.0f}, {row.ratio:.2f}" for row, other in others)
    notes = f"{name}. {lowest.notes} {told}".strip()
    return Row(
        claim, lowest.ours, lowest.peer, lowest.unit, lowest.limit, goal=lowest.goal, spread=lowest.spread, notes=notes
    )


def told_metrics(answers: Sequence[Job], *names: str) -> str:
    """Medians of metrics that our side told, such as `accepted_share 0.81`; what it did not tell is left out."""
    found: list[str] = []
    for name in names:
        values = [answer["metrics"][name] for answer in answers if name in answer["metrics"]]
        if values:
            found.append(f"{name.removeprefix('rollout/')} {Spread(values).median:.3g}")
    return ", ".join(found)


def metric_names(answers: Sequence[Job], start: str) -> list[str]:
    """Names that begin with `start`, sorted."""
    found: set[str] = set()
    for answer in answers:
        metrics: dict[str, Any] = answer["metrics"]
        found.update(name for name in metrics if name.startswith(start))
    return sorted(found)
