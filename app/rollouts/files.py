"""Rollout files through the artifact store: a group is one row group, a search reads the columns it needs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from app.artifacts import ArtifactStore
from app.errors import NotFound, Unavailable

Row = dict[str, Any]


@contextmanager
def opened(store: ArtifactStore, key: str) -> Iterator[pq.ParquetFile]:
    """Raises NotFound when the file is gone, Unavailable when it is not a whole Parquet file."""
    with store.open(key) as file:
        try:
            parquet = pq.ParquetFile(file)
        except pa.ArrowInvalid as error:
            raise Unavailable(f"The rollout file {key} is damaged: {error}") from error
        yield parquet


def about(parquet: pq.ParquetFile) -> dict[str, Any]:
    """What the engine wrote about the whole batch: batch, stage, policy_version, advantage."""
    metadata = parquet.schema_arrow.metadata or {}
    found: dict[str, Any] = json.loads(metadata.get(b"cohort", b"{}"))
    return found


def read_group(
    store: ArtifactStore, key: str, index: int, columns: Sequence[str] | None = None
) -> tuple[dict[str, Any], list[Row]]:
    """`about` and the rows of one group. Reads that row group only. Raises NotFound."""
    with opened(store, key) as parquet:
        if not 0 <= index < parquet.num_row_groups:
            raise NotFound(f"The batch has groups 0 to {parquet.num_row_groups - 1}; there is no group {index}.")
        rows: list[Row] = parquet.read_row_group(index, columns).to_pylist()
        return about(parquet), sorted(rows, key=lambda row: row["completion_index"])


def read_columns(store: ArtifactStore, key: str, columns: Sequence[str]) -> list[Row]:
    """These columns of every row."""
    with opened(store, key) as parquet:
        rows: list[Row] = parquet.read(columns).to_pylist()
        return rows


def read_where(store: ArtifactStore, key: str, columns: Sequence[str], where: Any) -> pa.Table:
    """These columns of the rows that an Arrow expression lets through; groups it rules out are not read."""
    with store.open(key) as file:
        try:
            return pq.read_table(file, columns=list(columns), filters=where)
        except pa.ArrowInvalid as error:
            raise Unavailable(f"The rollout file {key} is damaged: {error}") from error
