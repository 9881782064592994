"""Rollouts: the groups of a step, the completions of a group with their arithmetic. Batches are offered here too."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from sqlalchemy.orm import Session

from app.artifacts import ArtifactStore
from app.errors import NotFound
from app.models import Run
from app.rollouts import arithmetic, files
from app.rollouts.arithmetic import AdvantageForm, GroupNumbers, Whitening, mean_and_std
from app.rollouts.batches import BatchView, batch_view, batches_of_step, get_batch, list_batches
from app.rollouts.tokens import TOKEN_NUMBERS
from grpo_engine.events import split_nonfinite

__all__ = [
    "BatchView",
    "CompletionDetail",
    "GroupDetail",
    "GroupSummary",
    "PartDetail",
    "batch_groups",
    "batch_view",
    "batches_of_step",
    "get_batch",
    "group",
    "list_batches",
    "step_groups",
]

MAX_EXCERPT = 200


@dataclass(frozen=True, slots=True)
class GroupSummary:
    attempt: int
    batch: int
    index: int
    group_id: str
    prompt_id: str
    prompt_text: str
    """Shortened."""
    gold: str | None
    rewards: list[float | None]
    mean: float | None
    std: float | None
    dropped: str | None
    num_truncated: int
    mean_tokens: float


@dataclass(frozen=True, slots=True)
class PartDetail:
    name: str
    value: float | None
    """None: the part abstained."""
    weight: float
    counted: float | None
    """What the value counts as, after clip and gate."""
    product: float | None
    """weight x counted."""
    explanation: str
    span: tuple[int, int] | None
    """Characters of the completion's text that were judged."""
    version: str


@dataclass(frozen=True, slots=True)
class CompletionDetail:
    index: int
    text: str
    finish_reason: str
    num_tokens: int
    policy_version: int
    reward: float | None
    """As recorded."""
    shaped_reward: float | None
    """What the advantage was computed from where that is not the reward: parts normalised, KL subtracted, smoothed."""
    weighted_sum: float | None
    """Sum of the parts' products, computed here."""
    advantage: float | None
    """As recorded."""
    expected_advantage: float | None
    """By the group's form, computed here from what is recorded; null where that does not suffice."""
    baseline: float | None
    """What the form subtracts from the reward: the group's mean, in rloo the mean of the others."""
    rank: float | None
    """In rank: 1 = lowest, equals share the mean of theirs."""
    parts: list[PartDetail]
    nonfinite: dict[str, str] = field(default_factory=dict)
    """Name -> nan, +inf or -inf of numbers given as null because JSON has no such value."""

    @property
    def used_reward(self) -> float | None:
        """What the advantage was computed from."""
        return self.reward if self.shaped_reward is None else self.shaped_reward


@dataclass(frozen=True, slots=True)
class GroupDetail:
    batch: BatchView
    index: int
    group_id: str
    prompt_id: str
    prompt_position: int
    prompt_text: str
    gold: str | None
    columns: dict[str, Any]
    dropped: str | None
    form: AdvantageForm
    numbers: GroupNumbers
    whitening: Whitening | None
    """PPO: how return - value became the recorded advantage, as read from this group's tokens."""
    completions: list[CompletionDetail]


# ---------------------------------------------------------------- groups
_SUMMARY_COLUMNS = (
    "group_index", "group_id", "completion_index", "prompt_id", "prompt_text", "gold", "dropped", "reward",
    "finish_reason", "num_tokens",
)  # fmt: skip


def step_groups(
    session: Session, store: ArtifactStore, run: Run, stage: str, step: int, attempt: int | None = None
) -> list[GroupSummary]:
    """The groups that one step trained on. Raises NotFound when the step has no rollouts."""
    batches = batches_of_step(session, run, stage, step, attempt)
    if not batches:
        raise NotFound(f"Run {run.number} has no rollouts of step {step} in stage {stage}.")
    return [summary for batch in batches for summary in batch_groups(store, batch)]


def batch_groups(store: ArtifactStore, batch: BatchView) -> list[GroupSummary]:
    rows = files.read_columns(store, batch.key, _SUMMARY_COLUMNS)
    rows.sort(key=lambda row: (row["group_index"], row["completion_index"]))
    return [_summary(batch, list(members)) for _, members in groupby(rows, key=lambda row: row["group_index"])]


def _summary(batch: BatchView, rows: Sequence[files.Row]) -> GroupSummary:
    rewards = [finite(row["reward"]) for row in rows]
    mean, std = mean_and_std(rewards)
    first = rows[0]
    return GroupSummary(
        attempt=batch.attempt,
        batch=batch.batch,
        index=first["group_index"],
        group_id=first["group_id"],
        prompt_id=first["prompt_id"],
        prompt_text=first["prompt_text"][:MAX_EXCERPT],
        gold=first["gold"],
        rewards=rewards,
        mean=mean,
        std=std,
        dropped=first["dropped"],
        num_truncated=sum(row["finish_reason"] == "length" for row in rows),
        mean_tokens=sum(row["num_tokens"] for row in rows) / len(rows),
    )


_GROUP_COLUMNS = ("group_id", "prompt_id", "prompt_position", "prompt_text", "gold", "dropped")


def group(session: Session, store: ArtifactStore, run: Run, attempt: int, batch: int, index: int) -> GroupDetail:
    """One prompt's completions with rewards, parts and advantages as the arithmetic they are. Raises NotFound."""
    view = get_batch(session, run, attempt, batch)
    columns = [
        *_SUMMARY_COLUMNS, "prompt_position", "columns", "completion_text", "policy_version", "advantage", "parts",
        "shaped_reward", *TOKEN_NUMBERS,
    ]  # fmt: skip
    facts, rows = files.read_group(store, view.key, index, columns)
    form = arithmetic.form_of(facts)
    used = [_used(row) for row in rows]
    numbers, whitened = arithmetic.group_numbers(used, form), arithmetic.whitening(rows, form)
    first = rows[0]
    return GroupDetail(
        batch=view,
        index=index,
        **{name: first[name] for name in _GROUP_COLUMNS},
        columns=json.loads(first["columns"]),
        form=form,
        numbers=numbers,
        whitening=whitened,
        completions=[_completion(row, used, form, numbers, whitened) for row in rows],
    )


def _used(row: files.Row) -> float | None:
    """The reward that the advantage was computed from."""
    return finite(row["reward"] if row.get("shaped_reward") is None else row["shaped_reward"])


def _completion(
    row: files.Row,
    used: Sequence[float | None],
    form: AdvantageForm,
    numbers: GroupNumbers,
    whitened: Whitening | None,
) -> CompletionDetail:
    reward = _used(row)
    subtracted = arithmetic.baseline(reward, numbers, form)
    rank = arithmetic.mean_rank(reward, used, form)
    if form.kind == "gae":
        expected = arithmetic.expected_gae(row, whitened, form)
    else:
        expected = arithmetic.expected_advantage(reward, numbers, form, subtracted, rank)
    parts = [_part(part) for part in row["parts"]]
    products = [part.product for part in parts if part.product is not None]
    told = {name: row.get(name) for name in ("reward", "shaped_reward", "advantage")}
    kept, kinds = split_nonfinite({name: value for name, value in told.items() if value is not None})
    return CompletionDetail(
        index=row["completion_index"],
        text=row["completion_text"],
        finish_reason=row["finish_reason"],
        num_tokens=row["num_tokens"],
        policy_version=row["policy_version"],
        reward=kept.get("reward"),
        shaped_reward=kept.get("shaped_reward"),
        weighted_sum=math.fsum(products) if products else None,
        advantage=kept.get("advantage"),
        expected_advantage=expected,
        baseline=subtracted,
        rank=rank,
        parts=parts,
        nonfinite=dict(kinds),
    )


def _part(part: dict[str, Any]) -> PartDetail:
    value, weight = finite(part["value"]), part["weight"]
    counted = finite(part.get("counted", value))  # files of earlier versions neither clipped nor gated
    start, end = part["span_start"], part["span_end"]
    return PartDetail(
        name=part["name"],
        value=value,
        weight=weight,
        counted=counted,
        product=None if counted is None else weight * counted,
        explanation=part["explanation"],
        span=None if start is None else (start, end),
        version=part["version"],
    )


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
