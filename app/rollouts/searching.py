"""Search over every completion of a run, file by file in the order of training. What the user typed stays data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
from sqlalchemy.orm import Session

from app.artifacts import ArtifactStore
from app.errors import NotFound, Unavailable
from app.models import Attempt, RolloutBatch, Run
from app.paging import MAX_WHOLE_NUMBER, checked_limit, decode_cursor, encode_cursor
from app.rollouts import files
from app.rollouts.batches import BatchView, after_batch, batch_query, batch_view
from app.rollouts.service import finite

MAX_BATCHES_A_PAGE = 400
"""A page ends here even when it is not full; its cursor goes on."""
EXCERPT_CHARACTERS = 160
_COLUMNS = (
    "group_index", "completion_index", "prompt_id", "completion_text", "reward", "advantage", "num_tokens",
    "finish_reason",
)  # fmt: skip
_ORDER = "search"
_END = MAX_WHOLE_NUMBER


@dataclass(frozen=True, slots=True)
class SearchFilters:
    """Conditions that all must hold."""

    text: str | None = None
    """Contained, upper and lower case alike."""
    where: Literal["completion", "prompt", "both"] = "both"
    min_reward: float | None = None
    max_reward: float | None = None
    zero_part: str | None = None
    """Name of a reward part whose value is exactly 0."""
    behaviour: str | None = None
    """Name of a behaviour that the completion shows at least once, such as reflection."""
    truncated: bool | None = None
    """Ended by the token limit, or not."""
    prompt_id: str | None = None
    stage: str | None = None
    attempt: int | None = None


@dataclass(frozen=True, slots=True)
class Hit:
    attempt: int
    batch: int
    stage: str
    step: int | None
    group: int
    completion: int
    prompt_id: str
    excerpt: str
    """Part of the completion around the found text."""
    reward: float | None
    advantage: float | None
    num_tokens: int
    finish_reason: str


@dataclass(frozen=True, slots=True)
class SearchPage:
    items: list[Hit]
    next_cursor: str | None
    num_batches: int
    """Batches read for this page."""
    num_missing: int
    """Of them not there (not yet in the store, or removed)."""


def search(
    session: Session,
    store: ArtifactStore,
    run: Run,
    filters: SearchFilters,
    *,
    limit: int = 50,
    cursor: str | None = None,
) -> SearchPage:
    """One page of matching completions, in the order of attempt, batch, group, completion."""
    limit = checked_limit(limit)
    start = _start(cursor)
    hits: list[Hit] = []
    batches = _batches(session, run, filters, start)
    missing = 0
    for count, batch in enumerate(batches[:MAX_BATCHES_A_PAGE], 1):
        found = _hits(store, batch, filters)
        missing += found is None
        hits += [hit for hit in found or () if _place(hit) > start]
        if len(hits) > limit:
            return SearchPage(hits[:limit], encode_cursor(_ORDER, _place(hits[limit - 1])), count, missing)
    read = min(len(batches), MAX_BATCHES_A_PAGE)
    more = len(batches) > MAX_BATCHES_A_PAGE
    end = (batches[read - 1].attempt, batches[read - 1].batch, _END, _END) if more else ()
    return SearchPage(hits, encode_cursor(_ORDER, end) if more else None, read, missing)


def _start(cursor: str | None) -> tuple[int, ...]:
    """Place of the last hit given out; before everything without a cursor."""
    if not cursor:
        return (0, -1, _END, _END)
    values = decode_cursor(_ORDER, cursor)
    if len(values) != 4 or not all(isinstance(value, int) and abs(value) <= _END for value in values):
        return tuple(decode_cursor("another list", cursor))
    return tuple(values)


def _place(hit: Hit) -> tuple[int, ...]:
    return (hit.attempt, hit.batch, hit.group, hit.completion)


def _batches(session: Session, run: Run, filters: SearchFilters, start: tuple[int, ...]) -> list[BatchView]:
    """The batch at the start, which may hold more hits, and those behind it."""
    query = after_batch(batch_query(run), start[0], start[1] - 1)
    if filters.stage:
        query = query.where(RolloutBatch.stage == filters.stage)
    if filters.attempt is not None:
        query = query.where(Attempt.number == filters.attempt)
    return [batch_view(row, number) for row, number in session.execute(query.limit(MAX_BATCHES_A_PAGE + 1))]


def _hits(store: ArtifactStore, batch: BatchView, filters: SearchFilters) -> list[Hit] | None:
    """Matching completions of one batch in order; None when its file is not there."""
    columns = list(_COLUMNS)
    columns += ["prompt_text"] if filters.text and filters.where != "completion" else []
    columns += ["parts"] if filters.zero_part else []
    columns += ["behaviours"] if filters.behaviour else []
    try:
        table = files.read_where(store, batch.key, columns, _expression(filters))
    except (NotFound, Unavailable):
        return None
    if filters.zero_part:
        table = table.filter(_has_zero_part(table["parts"].combine_chunks(), filters.zero_part))
    if filters.behaviour:
        table = table.filter(_shows(table["behaviours"], filters.behaviour))
    rows = table.sort_by([("group_index", "ascending"), ("completion_index", "ascending")])
    return [_hit(batch, row, filters.text) for row in rows.select(list(_COLUMNS)).to_pylist()]


def _expression(filters: SearchFilters) -> Any:
    """The conditions on plain columns as one Arrow expression; None when there are none."""
    found = []
    if filters.text:
        columns = {"both": ("completion_text", "prompt_text")}.get(filters.where, (f"{filters.where}_text",))
        matches = [pc.match_substring(pc.field(name), filters.text, ignore_case=True) for name in columns]
        found.append(matches[0] if len(matches) == 1 else matches[0] | matches[1])
    if filters.min_reward is not None:
        found.append(pc.field("reward") >= filters.min_reward)
    if filters.max_reward is not None:
        found.append(pc.field("reward") <= filters.max_reward)
    if filters.truncated is not None:
        cut = pc.field("finish_reason") == "length"
        found.append(cut if filters.truncated else ~cut)
    if filters.prompt_id is not None:
        found.append(pc.field("prompt_id") == filters.prompt_id)
    whole = found[0] if found else None
    for condition in found[1:]:
        whole = whole & condition
    return whole


def _has_zero_part(parts: Any, name: str) -> Any:
    """One bool a row: its list of parts holds one of this name with value 0."""
    flat = pc.list_flatten(parts)
    zero = pc.and_(pc.equal(pc.struct_field(flat, "name"), name), pc.equal(pc.struct_field(flat, "value"), 0.0))
    rows = pc.unique(pc.list_parent_indices(parts).filter(pc.fill_null(zero, False)))
    return pc.is_in(pa.array(range(len(parts)), rows.type), value_set=rows)


def _shows(behaviours: Any, name: str) -> Any:
    """One bool a row: the behaviour was counted there at least once."""
    return pa.array([dict(counts or ()).get(name, 0) > 0 for counts in behaviours.to_pylist()], pa.bool_())


def _hit(batch: BatchView, row: files.Row, text: str | None) -> Hit:
    return Hit(
        attempt=batch.attempt,
        batch=batch.batch,
        stage=batch.stage,
        step=batch.step,
        group=row["group_index"],
        completion=row["completion_index"],
        prompt_id=row["prompt_id"],
        excerpt=excerpt(row["completion_text"], text),
        reward=finite(row["reward"]),
        advantage=finite(row["advantage"]),
        num_tokens=row["num_tokens"],
        finish_reason=row["finish_reason"],
    )


def excerpt(whole: str, text: str | None) -> str:
    """At most EXCERPT_CHARACTERS of a text, around the first place where `text` stands in it."""
    place = whole.lower().find(text.lower()) if text else 0
    start = max(0, place - EXCERPT_CHARACTERS // 3)
    piece = whole[start : start + EXCERPT_CHARACTERS]
    return ("…" if start else "") + piece + ("…" if start + len(piece) < len(whole) else "")
