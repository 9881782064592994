"""Stored rollouts scored again by another reward: no model, no GPU. The rollout files stay as they are. Torch-free.

A file is one batch, so that parts normalised over the batch see what they saw in training. Written besides: one row a
completion with the reward, advantage and parts that the other reward gives; the old ones keep their versions.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_engine.errors import RewardError
from grpo_engine.reward.composite import Composite
from grpo_engine.reward.replay_changes import Changes, Rescored, advantages
from grpo_engine.rollout_files import PART, part_row, spread
from grpo_engine.types import Completion, Group, Prompt, RewardPart, Rollout

Row = dict[str, Any]
COLUMNS = (
    "group_id", "group_index", "completion_index", "prompt_id", "prompt_position", "prompt_text", "columns", "gold",
    "completion_text", "finish_reason", "num_tokens", "reward", "shaped_reward", "parts",
)  # fmt: skip
SCHEMA = pa.schema(
    [
        ("batch", pa.int32()),
        ("group_id", pa.string()),
        ("group_index", pa.int32()),
        ("completion_index", pa.int32()),
        ("prompt_id", pa.string()),
        ("old_reward", pa.float64()),
        ("new_reward", pa.float64()),
        ("old_advantage", pa.float64()),
        ("new_advantage", pa.float64()),
        ("new_parts", pa.list_(PART)),
    ]
)


def replay(paths: Sequence[Path], rewards: Composite, out: Path) -> dict[str, Any]:
    """Score every completion of these rollout files, write `out` (Parquet), and return the summary of what changed.

    Raises RewardError for a file that cannot be read."""
    changes = Changes()
    aside = out.with_suffix(".tmp")
    with pq.ParquetWriter(aside, SCHEMA, compression="zstd") as writer:
        for path in paths:
            for group in rescored(path, rewards):
                changes.add(group)
                writer.write_table(pa.Table.from_pylist(_rows(group), schema=SCHEMA))
    os.replace(aside, out)
    return {"num_batches": len(paths), **changes.summary()}


def rescored(path: Path, rewards: Composite) -> list[list[Rescored]]:
    """The groups of one rollout file, each completion with both rewards."""
    about, groups = read_batch(path)
    judged = rewards.combine(_scored(groups, rewards))
    shaped_by_more = _shaped_by_more_than_parts(about)
    return [
        [
            _pair(about.get("batch", 0), row, rollout, shaped_by_more)
            for row, rollout in zip(rows, group.rollouts, strict=True)
        ]
        for rows, group in zip(groups, judged, strict=True)
    ]


def read_batch(path: Path) -> tuple[dict[str, Any], list[list[Row]]]:
    """What the file says about its batch, and the rows of each group in order. Raises RewardError."""
    try:
        with pq.ParquetFile(path) as file:
            names = [name for name in COLUMNS if name in file.schema_arrow.names]
            table = file.read(names)
            about = json.loads((file.schema_arrow.metadata or {}).get(b"cohort", b"{}"))
    except (OSError, pa.ArrowInvalid, ValueError) as error:
        raise RewardError(f"The rollout file {path} cannot be read: {error}") from error
    rows = table.sort_by([("group_index", "ascending"), ("completion_index", "ascending")]).to_pylist()
    return about, [list(members) for _, members in groupby(rows, key=lambda row: row["group_index"])]


def _shaped_by_more_than_parts(about: dict[str, Any]) -> bool:
    """Whether KL or smoothing went into the shaped reward, which a replay does not know."""
    form = about.get("advantage", {})
    kl = form.get("kl") or {}
    return bool(form.get("smooth_rewards")) or (kl.get("place") == "reward" and kl.get("weight", 0) != 0)


def _scored(groups: Sequence[Sequence[Row]], rewards: Composite) -> list[Group]:
    prompts = [prompt for rows in groups for prompt in [_prompt(rows[0])] * len(rows)]
    completions = [_completion(row) for rows in groups for row in rows]
    pairs = iter(list(zip(completions, rewards.score(prompts, completions), strict=True)))
    return [
        Group(rows[0]["group_id"], _prompt(rows[0]), [Rollout(*next(pairs), None) for _ in rows]) for rows in groups
    ]


def _prompt(row: Row) -> Prompt:
    return Prompt(row["prompt_id"], row["prompt_position"], row["prompt_text"], [], json.loads(row["columns"]))


def _completion(row: Row) -> Completion:
    """Its token ids are placeholders: rewards look at how many there are, not which."""
    return Completion([0] * row["num_tokens"], row["completion_text"], row["finish_reason"], [], [])


def _pair(batch: int, row: Row, rollout: Rollout, shaped_by_more: bool) -> Rescored:
    old, shaped = _finite(row["reward"]), _finite(row.get("shaped_reward"))
    return Rescored(
        batch=batch,
        **{name: row[name] for name in ("group_index", "completion_index", "group_id", "prompt_id", "prompt_text")},
        gold=row["gold"],
        text=row["completion_text"],
        old_reward=old,
        new_reward=_finite(rollout.reward),
        old_used=old if shaped is None or shaped_by_more else shaped,
        new_used=_finite(rollout.reward if rollout.shaped_reward is None else rollout.shaped_reward),
        old_parts=[_old_part(part) for part in row["parts"]],
        new_parts=rollout.parts,
    )


def _old_part(part: dict[str, Any]) -> RewardPart:
    value = _finite(part["value"])
    counted = _finite(part.get("counted", value))  # files of earlier versions neither clipped nor gated
    return RewardPart(part["name"], value, part["weight"], part["explanation"], None, part["version"], counted)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _rows(group: Sequence[Rescored]) -> list[Row]:
    before = advantages([row.old_used for row in group])
    after = advantages([row.new_used for row in group])
    return [
        {
            **{name: getattr(row, name) for name in ("batch", "group_id", "group_index", "completion_index")},
            "prompt_id": row.prompt_id,
            "old_reward": row.old_reward,
            "new_reward": row.new_reward,
            "old_advantage": old,
            "new_advantage": new,
            "new_parts": [part_row(part) for part in row.new_parts],
        }
        for row, old, new in zip(group, before, after, strict=True)
    ]


# ---------------------------------------------------------------- which files
def rollout_files(given: Sequence[Path], stage: str | None, max_batches: int | None) -> tuple[str, list[Path]]:
    """The stage and its rollout files among files and folders (an attempt's, or its `rollouts`), in order.

    `stage` None = the only one there is. Of more than `max_batches` files as many are taken, evenly spread, first and
    last among them. Raises RewardError when nothing is there, or several stages are and none was named."""
    found = [path for one in given for path in _below(one)]
    if not found:
        raise RewardError(f"There is no rollout file below {', '.join(map(str, given))}.")
    by_stage: dict[str, list[Path]] = {}
    for path in found:
        by_stage.setdefault(_stage_of(path), []).append(path)
    if stage is None and len(by_stage) > 1:
        raise RewardError(f"The rollouts are of several stages ({', '.join(sorted(by_stage))}); name one.")
    chosen = stage or next(iter(by_stage))
    if chosen not in by_stage:
        raise RewardError(f"There are no rollouts of stage {chosen}, but of {', '.join(sorted(by_stage))}.")
    return chosen, spread(by_stage[chosen], max_batches)


def _below(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif not path.is_dir():
        raise RewardError(f"There is no file or folder {path}; it may have been removed.")
    else:
        yield from sorted([*path.glob("batch-*.parquet"), *path.glob("rollouts/batch-*.parquet")])


def _stage_of(path: Path) -> str:
    try:
        metadata = pq.read_schema(path).metadata or {}
        return str(json.loads(metadata.get(b"cohort", b"{}")).get("stage", ""))
    except (OSError, pa.ArrowInvalid, ValueError) as error:
        raise RewardError(f"The rollout file {path} cannot be read: {error}") from error
