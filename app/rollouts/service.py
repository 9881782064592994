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
from app.rollouts import files
from app.rollouts.batches import BatchView, batch_view, batches_of_step, get_batch, list_batches
from grpo_engine.events import split_nonfinite

__all__ = [
    "BatchView",
    "CompletionDetail",
    "GroupDetail",
    "GroupSummary",
    "PartDetail",
    "TokenDetail",
    "batch_groups",
    "batch_view",
    "batches_of_step",
    "get_batch",
    "group",
    "list_batches",
    "step_groups",
    "tokens",
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
    product: float | None
    """weight x value."""
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
    weighted_sum: float | None
    """Sum of the parts' products, computed here."""
    advantage: float | None
    """As recorded."""
    expected_advantage: float | None
    """(reward - mean) / std, computed here from the recorded rewards."""
    parts: list[PartDetail]
    nonfinite: dict[str, str] = field(default_factory=dict)
    """Name -> nan, +inf or -inf of numbers given as null because JSON has no such value."""


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
    mean: float | None
    """Of the rewards that are not null."""
    std: float | None
    """Sample standard deviation of them; null below two."""
    normalize_std: bool
    completions: list[CompletionDetail]


@dataclass(frozen=True, slots=True)
class TokenDetail:
    position: int
    id: int
    text: str
    logprob: float | None
    """As sampled from, nats."""
    full_logprob: float | None
    """Of the untruncated distribution."""
    ref_logprob: float | None
    kept: list[int] | None
    """Token ids that truncated sampling kept; None without truncation."""
    nonfinite: dict[str, str] = field(default_factory=dict)


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
    ]  # fmt: skip
    facts, rows = files.read_group(store, view.key, index, columns)
    mean, std = mean_and_std([row["reward"] for row in rows])
    normalize = bool(facts.get("advantage", {}).get("normalize_std", True))
    first = rows[0]
    return GroupDetail(
        batch=view,
        index=index,
        **{name: first[name] for name in _GROUP_COLUMNS},
        columns=json.loads(first["columns"]),
        mean=mean,
        std=std,
        normalize_std=normalize,
        completions=[_completion(row, mean, std, normalize) for row in rows],
    )


def _completion(row: files.Row, mean: float | None, std: float | None, normalize: bool) -> CompletionDetail:
    parts = [_part(part) for part in row["parts"]]
    products = [part.product for part in parts if part.product is not None]
    numbers = {name: row[name] for name in ("reward", "advantage") if row[name] is not None}
    kept, kinds = split_nonfinite(numbers)
    return CompletionDetail(
        index=row["completion_index"],
        text=row["completion_text"],
        finish_reason=row["finish_reason"],
        num_tokens=row["num_tokens"],
        policy_version=row["policy_version"],
        reward=kept.get("reward"),
        weighted_sum=math.fsum(products) if products else None,
        advantage=kept.get("advantage"),
        expected_advantage=expected_advantage(kept.get("reward"), mean, std, normalize),
        parts=parts,
        nonfinite=dict(kinds),
    )


def _part(part: dict[str, Any]) -> PartDetail:
    value, weight = finite(part["value"]), part["weight"]
    start, end = part["span_start"], part["span_end"]
    return PartDetail(
        name=part["name"],
        value=value,
        weight=weight,
        product=None if value is None else weight * value,
        explanation=part["explanation"],
        span=None if start is None else (start, end),
        version=part["version"],
    )


# ---------------------------------------------------------------- arithmetic
def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def mean_and_std(rewards: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean and sample standard deviation of the finite rewards; std needs two."""
    known = [reward for reward in rewards if reward is not None and math.isfinite(reward)]
    if not known:
        return None, None
    mean = math.fsum(known) / len(known)
    if len(known) < 2:
        return mean, None
    return mean, math.sqrt(math.fsum((reward - mean) ** 2 for reward in known) / (len(known) - 1))


def expected_advantage(reward: float | None, mean: float | None, std: float | None, normalize: bool) -> float | None:
    """(r - mean) / std of GRPO (DeepSeekMath eq. 3), r - mean of Dr.GRPO; 0 without variance or reward."""
    if mean is None:
        return None
    if reward is None or std is None or std < 1e-6 * max(1.0, abs(mean)):
        return 0.0
    return (reward - mean) / std if normalize else reward - mean


# ---------------------------------------------------------------- tokens
_TOKEN_COLUMNS = (
    "completion_index", "token_ids", "token_texts", "logprobs", "full_logprobs", "ref_logprobs", "kept_ids",
)  # fmt: skip


def tokens(
    session: Session, store: ArtifactStore, run: Run, attempt: int, batch: int, index: int, completion: int
) -> list[TokenDetail]:
    """The tokens of one completion with their log-probabilities. Raises NotFound."""
    view = get_batch(session, run, attempt, batch)
    _, rows = files.read_group(store, view.key, index, _TOKEN_COLUMNS)
    for row in rows:
        if row["completion_index"] == completion:
            return [_token(row, position) for position in range(len(row["token_ids"]))]
    raise NotFound(f"Group {index} of batch {batch} has no completion {completion}.")


def _token(row: files.Row, position: int) -> TokenDetail:
    def at(column: str) -> Any:
        values = row[column]
        return values[position] if values and position < len(values) else None

    numbers = {"logprob": at("logprobs"), "full_logprob": at("full_logprobs"), "ref_logprob": at("ref_logprobs")}
    kept, kinds = split_nonfinite({name: value for name, value in numbers.items() if value is not None})
    return TokenDetail(
        position=position,
        id=row["token_ids"][position],
        text=at("token_texts") or "",
        logprob=kept.get("logprob"),
        full_logprob=kept.get("full_logprob"),
        ref_logprob=kept.get("ref_logprob"),
        kept=at("kept_ids"),
        nonfinite=dict(kinds),
    )
