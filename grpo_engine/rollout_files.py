"""Rollout files: one Parquet file a batch, one row a completion, one row group a prompt group. Torch-free.

Whoever opens a group reads its row group only; whoever searches reads the columns it needs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_engine.types import Group, RewardPart, Rollout

T = TypeVar("T")

PART = pa.struct(
    [
        ("name", pa.string()),
        ("value", pa.float64()),
        ("weight", pa.float64()),
        ("explanation", pa.string()),
        ("span_start", pa.int32()),
        ("span_end", pa.int32()),
        ("version", pa.string()),
        ("counted", pa.float64()),  # what the value counts as, after clip and gate; null when it abstained
    ]
)
SCHEMA = pa.schema(
    [
        ("group_id", pa.string()),
        ("group_index", pa.int32()),
        ("completion_index", pa.int32()),
        ("prompt_id", pa.string()),
        ("prompt_position", pa.int64()),
        ("prompt_text", pa.string()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("columns", pa.string()),  # the dataset row as JSON
        ("gold", pa.string()),  # its `answer`, null when there is none
        ("completion_text", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("token_texts", pa.list_(pa.string())),
        ("logprobs", pa.list_(pa.float32())),
        ("full_logprobs", pa.list_(pa.float32())),
        ("ref_logprobs", pa.list_(pa.float32())),
        ("kept_ids", pa.list_(pa.list_(pa.int32()))),
        ("finish_reason", pa.string()),
        ("num_tokens", pa.int32()),
        ("policy_version", pa.int32()),
        ("reward", pa.float64()),  # null when every part abstained
        ("shaped_reward", pa.float64()),  # what the advantage was computed from, null where it is the reward itself
        ("advantage", pa.float64()),
        ("values", pa.list_(pa.float32())),  # PPO: the critic's, a token; null in other forms, as the next two
        ("token_advantages", pa.list_(pa.float32())),
        ("returns", pa.list_(pa.float32())),
        ("dropped", pa.string()),  # why the group was not trained on, null when it was
        ("parts", pa.list_(PART)),
        ("behaviours", pa.map_(pa.string(), pa.int32())),  # how often it reflects, backtracks …; no part of the reward
    ]
)


def batch_name(batch: int) -> str:
    """Example: batch_name(123) == "batch-000123.parquet"."""
    return f"batch-{batch:06d}.parquet"


def write_batch(path: Path, groups: Sequence[Group], about: dict[str, Any]) -> None:
    """Write the groups of one batch aside, fsync and rename; `about` (JSON) goes into the file's metadata.

    `about` holds batch, stage, policy_version and `advantage`: {"form": "grpo", … its config, "kl": {…}}."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    schema = SCHEMA.with_metadata({"cohort": json.dumps(about)})
    with pq.ParquetWriter(aside, schema, compression="zstd") as writer:
        for index, group in enumerate(groups):
            writer.write_table(pa.Table.from_pylist(list(_rows(group, index)), schema=schema))
    with open(aside, "rb") as file:
        os.fsync(file.fileno())
    os.replace(aside, path)


def _rows(group: Group, index: int) -> Iterator[dict[str, Any]]:
    prompt = group.prompt
    gold = prompt.columns.get("answer")
    shared = {
        "group_id": group.id,
        "group_index": index,
        "prompt_id": prompt.id,
        "prompt_position": prompt.position,
        "prompt_text": prompt.text,
        "prompt_token_ids": prompt.token_ids,
        "columns": json.dumps(prompt.columns, ensure_ascii=False),
        "gold": None if gold is None else gold if isinstance(gold, str) else json.dumps(gold, ensure_ascii=False),
        "dropped": group.dropped,
    }
    for number, rollout in enumerate(group.rollouts):
        yield {**shared, "completion_index": number, **_completion_columns(rollout)}


def _completion_columns(rollout: Rollout) -> dict[str, Any]:
    completion = rollout.completion
    return {
        "completion_text": completion.text,
        "token_ids": completion.token_ids,
        "token_texts": completion.token_texts,
        "logprobs": completion.logprobs,
        "full_logprobs": completion.full_logprobs,
        "ref_logprobs": rollout.ref_logprobs,
        "kept_ids": completion.kept_ids,
        "finish_reason": completion.finish_reason,
        "num_tokens": len(completion.token_ids),
        "policy_version": completion.policy_version,
        "reward": rollout.reward,
        "shaped_reward": rollout.shaped_reward,
        "advantage": rollout.advantage,
        "values": rollout.values,
        "token_advantages": rollout.token_advantages,
        "returns": rollout.returns,
        "behaviours": list(rollout.behaviours.items()),
        "parts": [part_row(part) for part in rollout.parts],
    }


def part_row(part: RewardPart) -> dict[str, Any]:
    """A part as PART has it."""
    return {
        "name": part.name,
        "value": part.value,
        "weight": part.weight,
        "explanation": part.explanation,
        "span_start": part.span[0] if part.span else None,
        "span_end": part.span[1] if part.span else None,
        "version": part.version,
        "counted": part.counted,
    }


def spread(items: Sequence[T], count: int | None) -> list[T]:
    """At most `count` of them, evenly spread. Example: spread([1, 2, 3, 4, 5], 3) == [1, 3, 5]; one of several is the
    last."""
    if count is None or len(items) <= count:
        return list(items)
    if count == 1:
        return [items[-1]]
    return [items[round(place * (len(items) - 1) / (count - 1))] for place in range(count)]
