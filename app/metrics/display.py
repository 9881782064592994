"""Metrics as pages show them: with unit, verdict and sparkline; and which charts belong together."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from urllib.parse import quote, urlencode

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.formatting import MINUS, MISSING, duration, number, percent, size
from app.models import Attempt, Point, Run, Series
from app.runs.progress import stage_index
from grpo_engine.diagnostics.catalogue import KEY_INDICATORS, METRICS, info, judge

WINDOW_STEPS = 60
SFT_INDICATORS = (
    "loss", "sft/token_accuracy", "optimizer/gradient_norm", "optimizer/learning_rate", "throughput/tokens_per_s",
    "memory/rss_bytes",
)  # fmt: skip
_GROUPS = [
    "reward", "reward parts", "evaluation", "behaviour", "completion", "groups", "policy", "value", "supervised",
    "sampler", "rollout", "mtp", "optimizer", "gradient by position", "speed", "memory",
]  # fmt: skip
FAMILIES = {
    "rollout/draft_length_share_": ("Draft lengths", "{} drafted"),
    "rollout/accepted_share_": ("Drafts accepted up to a token", "token {}"),
    "mtp/loss_": ("MTP heads, loss", "head {}"),
    "mtp/accuracy_": ("MTP heads, accuracy", "head {}"),
    "behaviour/": ("Behaviours", "{}"),
}
"""Beginning of the names that differ by a number, or by a behaviour -> their one chart's label, and a line's."""
VERDICT_WORDS = {"good": "good", "warning": "warning", "bad": "bad", "none": "no verdict"}
NAMES_OF_KINDS = {"nan": math.nan, "+inf": math.inf, "-inf": -math.inf}
Values = Mapping[str, Sequence[float]]
"""Metric -> its last values, oldest first; a value that is not finite is NaN or infinite."""


@dataclass(frozen=True)
class Indicator:
    name: str
    label: str
    text: str
    unit: str
    verdict: str
    verdict_word: str
    title: str
    values: Sequence[float]


@dataclass(frozen=True)
class Chart:
    names: list[str]
    label: str
    description: str
    unit: str
    format: str
    """percent, bytes, seconds, or empty for plain numbers."""
    latest: str
    legend: list[tuple[str, str]]
    optional: bool = False
    """Hidden until it has a value."""
    smooth: bool = True
    """False for measurements every few steps, of which each counts."""


@dataclass(frozen=True)
class ChartSet:
    stage: str
    series_url: str
    step_url: str
    charts: list[Chart]
    wide: bool = False


def display(name: str, value: float | None) -> tuple[str, str]:
    """Text and unit. Example: display("policy/entropy", 0.036) == ("0.036", "nats")."""
    about = info(name)
    if value is None:
        return MISSING, ""
    if not math.isfinite(value):
        return number(value), ""
    match about.format:
        case "percent":
            return percent(value), ""
        case "bytes":
            return size(value), ""
        case "seconds":
            return duration(value), ""
        case "integer":
            return f"{value:,.0f}".replace("-", MINUS), about.unit if about.unit not in (
                "steps",
                "groups",
                "rollbacks",
                "updates",
            ) else ""
        case "si" | "digits" | "scientific":
            return number(value if value % 1 or abs(value) < 1000 else int(value)), about.unit
    raise AssertionError(about.format)


def recent_values(session: Session, run: Run, stage: str) -> dict[str, list[float]]:
    """The last values of every metric of one stage, newest attempt first where a step was repeated."""
    own = select(Series.id, Series.name, Attempt.number).join(Attempt, Attempt.id == Series.attempt_id)
    own_series = own.where(Attempt.run_id == run.id, Series.stage == stage).subquery()
    last = session.scalar(select(func.max(Point.step)).join(own_series, own_series.c.id == Point.series_id))
    if last is None:
        return {}
    query = select(own_series.c.name, Point.step, Point.value, Point.kind)
    query = query.join(own_series, own_series.c.id == Point.series_id).order_by(own_series.c.number)
    rare = own_series.c.name.startswith("evaluation/")
    rows = [
        *session.execute(query.where(~rare, Point.step > last - WINDOW_STEPS)),
        *session.execute(query.where(rare)),
    ]
    found: dict[str, dict[int, float]] = {}
    for name, step, value, kind in rows:
        found.setdefault(name, {})[step] = NAMES_OF_KINDS[kind] if kind else value if value is not None else math.nan
    return {name: [points[step] for step in sorted(points)][-WINDOW_STEPS:] for name, points in found.items()}


def has_steps(values: Values) -> bool:
    """Whether the stage has done a step; before it there may be an evaluation, which names no charts."""
    return any(not name.startswith("evaluation/") for name in values)


def indicators(values: Values) -> list[Indicator]:
    """The twelve key indicators of reinforcement learning, or six of supervised fine-tuning.

    Where a device allocates, what it wastes tells more than the process's own memory."""
    names = KEY_INDICATORS if "reward/mean" in values or "policy/entropy" in values else SFT_INDICATORS
    if "memory/fragmentation_share" in values:
        names = tuple("memory/fragmentation_share" if name == "memory/rss_bytes" else name for name in names)
    return [_indicator(name, values.get(name, [])) for name in names]


def _indicator(name: str, values: Sequence[float]) -> Indicator:
    about = info(name)
    value = values[-1] if values else None
    text, unit = display(name, value)
    found = judge(name, value, [v for v in values[:-1] if math.isfinite(v)])
    title = f"{about.description} {found.reason}"
    return Indicator(name, about.label, text, unit, found.level, VERDICT_WORDS[found.level], title, values)


# ---------------------------------------------------------------- charts
def overview_charts(run: Run, stage: str, values: Values) -> ChartSet:
    """The charts that tell most, the reward with its parts first."""
    if run.config["stages"][stage_index(stage)]["kind"] == "sft":
        charts = [_chart([name], values) for name in SFT_INDICATORS]
        return _chart_set(run, stage, charts, with_rollouts=False)
    parts = sorted(name for name in values if name.startswith("reward/part/") and name.endswith("/mean"))
    charts = [
        _chart(["reward/mean", *parts], values, label="Reward and its parts"),
        _chart(["completion/mean_length_tokens"], values),
        _chart(["policy/entropy"], values),
        _chart(["policy/kl"], values),
        _chart(["optimizer/gradient_norm"], values),
        _chart(["policy/clip_share"], values),
        *([_chart(["value/explained_variance"], values)] if "value/explained_variance" in values else []),
        *([_chart(["rollout/tokens_per_forward"], values)] if "rollout/drafted_tokens" in values else []),
        _chart(["throughput/tokens_per_s"], values),
        _chart(["evaluation/accuracy_greedy", "evaluation/accuracy_sampled"], values, label="Held-out accuracy"),
    ]
    return _chart_set(run, stage, charts, with_rollouts=True)


def all_charts(run: Run, stage: str, values: Values) -> ChartSet:
    """One chart a metric, or a family of them; metrics of a group side by side."""
    with_rollouts = run.config["stages"][stage_index(stage)]["kind"] != "sft"
    charts = [_chart(names, values, FAMILIES[family][0] if family else "") for family, names in _by_family(values)]
    return _chart_set(run, stage, charts, with_rollouts=with_rollouts, wide=True)


def _by_family(names: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Names of each chart, in order; the family is empty for a metric that stands alone."""
    alone_or_family = groupby(sorted(names, key=_place), key=lambda name: family_of(name) or name)
    return [(key if key in FAMILIES else "", list(members)) for key, members in alone_or_family]


def family_of(name: str) -> str:
    """Example: family_of("mtp/loss_2") == "mtp/loss_"; empty when its name ends in no number or has no family."""
    if name.startswith("behaviour/"):
        return "behaviour/"
    start = name.rstrip("0123456789")
    return start if start != name and start in FAMILIES else ""


def _place(name: str) -> tuple[int, int, int, int, str]:
    """Order of a metric among the charts: its group, then the catalogue's order, then families by their number."""
    group = info(name).group
    known, families = list(METRICS), list(FAMILIES)
    family = family_of(name)
    return (
        _GROUPS.index(group) if group in _GROUPS else len(_GROUPS),
        known.index(name) if name in METRICS else len(known),
        families.index(family) if family else -1,
        _first_number(name),
        name,
    )


def _first_number(name: str) -> int:
    """Example: _first_number("gradient/position/512-1023") == 512, of "mtp/loss_2" 2; 0 without one."""
    digits = name.rpartition("/")[2].partition("-")[0].rpartition("_")[2]
    return int(digits) if digits.isdecimal() else 0


def _chart(names: list[str], values: Values, label: str = "") -> Chart:
    about = info(names[0])
    latest = values.get(names[0], [])
    text, unit = display(names[0], latest[-1] if latest else None)
    return Chart(
        names=names,
        label=label or about.label,
        description=about.description,
        unit=about.unit if about.format in ("digits", "si", "scientific") else "s" if about.format == "seconds" else "",
        format=about.format if about.format in ("percent", "bytes", "seconds") else "",
        latest=f"{text} {unit}".strip(),
        legend=[(name, _short(name)) for name in names],
        smooth=not names[0].startswith("evaluation/"),
    )


def _short(name: str) -> str:
    """Example: "reward/part/accuracy/mean" -> "accuracy"."""
    parts = name.split("/")
    if family := family_of(name):
        return FAMILIES[family][1].format(name.removeprefix(family).replace("_", " "))
    return parts[2] if name.startswith("reward/part/") else info(name).label.removeprefix("Accuracy, ").lower()


def _chart_set(run: Run, stage: str, charts: list[Chart], *, with_rollouts: bool, wide: bool = False) -> ChartSet:
    names = [name for chart in charts for name in chart.names]
    url = f"/runs/{run.number}/series?{urlencode({'stage': stage, 'names': json.dumps(names)})}"
    step_url = f"/runs/{run.number}/steps/{quote(stage)}/STEP" if with_rollouts else ""
    return ChartSet(stage, url, step_url, charts, wide)


def newest_values(session: Session, run: Run, stage: str, prefix: str) -> dict[str, float]:
    """Finite values of the newest step that has metrics whose names begin so; what that step did not tell is absent."""
    own = select(Series.name, Point.value, Point.step, Series.attempt_id)
    own = own.join(Attempt, Attempt.id == Series.attempt_id).join(Point, Point.series_id == Series.id)
    own = own.where(Attempt.run_id == run.id, Series.stage == stage, Series.name.startswith(prefix, autoescape=True))
    newest = session.execute(own.order_by(Point.step.desc(), Attempt.number.desc()).limit(1)).first()
    if newest is None:
        return {}
    query = own.where(Point.step == newest.step, Series.attempt_id == newest.attempt_id, Point.value.is_not(None))
    return {row.name: row.value for row in session.execute(query)}


def new_points(session: Session, run: Run, stage: str, after: int) -> dict[str, list[list[int | float | str | None]]]:
    """Points of a stage from step `after` on as [step, value, kind], newest attempt where a step was repeated.

    That step itself again: its evaluation is told after its metrics."""
    query = (
        select(Series.name, Point.step, Point.value, Point.kind)
        .join(Attempt, Attempt.id == Series.attempt_id)
        .join(Point, Point.series_id == Series.id)
        .where(Attempt.run_id == run.id, Series.stage == stage, Point.step >= after)
        .order_by(Attempt.number)
    )
    found: dict[str, dict[int, list[int | float | str | None]]] = {}
    for name, step, value, kind in session.execute(query):
        found.setdefault(name, {})[step] = [step, value, kind]
    return {name: [points[step] for step in sorted(points)] for name, points in found.items()}
