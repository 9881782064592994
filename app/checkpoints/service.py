"""Checkpoints: list, verify by reading every byte again, hand out single files or the whole folder as a tar stream."""

from __future__ import annotations

import hashlib
import tarfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import ValidationError
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from app.artifacts import ArtifactStore, BadKey, Entry
from app.db import Database
from app.errors import Conflict, NotFound
from app.models import Attempt, Checkpoint, Run, utc_now
from app.paging import Key, Page, after, checked_limit, decode_cursor, encode_cursor, order_by
from grpo_engine.manifest import MANIFEST_NAME, Manifest

_BLOCK = 512


@dataclass(frozen=True, slots=True)
class CheckpointView:
    checkpoint: Checkpoint
    run_number: int
    attempt: int
    parent_step: int | None
    """Step of the checkpoint it was trained from."""


@dataclass(frozen=True, slots=True)
class Verification:
    checkpoint: Checkpoint
    damage: list[str]
    """What differs from the manifest; empty when every byte is as it was written."""


# ---------------------------------------------------------------- find
_KEYS = [
    Key(Run.number.expression, descending=True),
    Key(Checkpoint.saved_at.expression, descending=True),
    Key(Checkpoint.id.expression),
]


def list_checkpoints(
    session: Session, run: Run | None = None, *, limit: int = 100, cursor: str | None = None, removed: bool = True
) -> Page[CheckpointView]:
    """One page of a run's checkpoints (of all runs without one), newest first."""
    query = (
        select(Checkpoint, Run.number, Attempt.number)
        .join(Run, Run.id == Checkpoint.run_id)
        .join(Attempt, Attempt.id == Checkpoint.attempt_id)
        .order_by(*order_by(_KEYS))
        .limit(checked_limit(limit) + 1)
    )
    if run is not None:
        query = query.where(Checkpoint.run_id == run.id)
    if not removed:
        query = query.where(Checkpoint.state != "removed")
    if cursor:
        query = query.where(after(_KEYS, decode_cursor("checkpoints", cursor)))
    rows = list(session.execute(query))
    shown = rows[: checked_limit(limit)]
    parents = {row.parent_id for row, _, _ in shown if row.parent_id}
    found = select(Checkpoint.id, Checkpoint.step).where(Checkpoint.id.in_(parents))
    steps = dict(session.execute(found).all())
    items = [
        CheckpointView(row, number, attempt, steps.get(row.parent_id) if row.parent_id else None)
        for row, number, attempt in shown
    ]
    return Page(items, _cursor(items[-1]) if len(rows) > len(items) else None)


def _cursor(view: CheckpointView) -> str:
    row = view.checkpoint
    return encode_cursor("checkpoints", [view.run_number, row.saved_at, row.id])


def get_checkpoint(session: Session, checkpoint_id: uuid.UUID) -> Checkpoint:
    """Raises NotFound."""
    checkpoint = session.get(Checkpoint, checkpoint_id)
    if checkpoint is None:
        raise NotFound(f"There is no checkpoint {checkpoint_id}.")
    return checkpoint


def view_of(session: Session, checkpoint: Checkpoint) -> CheckpointView:
    run = session.get_one(Run, checkpoint.run_id)
    attempt = session.get_one(Attempt, checkpoint.attempt_id)
    parent = session.get(Checkpoint, checkpoint.parent_id) if checkpoint.parent_id else None
    return CheckpointView(checkpoint, run.number, attempt.number, parent.step if parent else None)


# ---------------------------------------------------------------- files
def files(store: ArtifactStore, checkpoint: Checkpoint) -> list[Entry]:
    """Every file, sorted by path. Raises Conflict when retention removed the checkpoint, NotFound when it is gone."""
    if checkpoint.state == "removed":
        raise Conflict(f"The checkpoint of step {checkpoint.step} was removed by retention (checkpoint.keep_last).")
    found = store.list(checkpoint.path)
    if not found:
        raise NotFound(f"The files of the checkpoint of step {checkpoint.step} are gone.")
    return found


def file_key(store: ArtifactStore, checkpoint: Checkpoint, path: str) -> str:
    """Artifact key of one file. Raises BadKey for a path outside the checkpoint, NotFound when it has no such file."""
    key = f"{checkpoint.path}/{path}"
    store.path_of(key)
    if path not in {entry.path for entry in files(store, checkpoint)}:
        raise NotFound(f"The checkpoint has no file {path[:100]}.")
    return key


PARTS = {
    "trainer/mtp/": "MTP heads, with their optimizer",
    "trainer/value/": "value model, with its optimizer",
    "trainer/adapter/": "adapter",
    "trainer/": "trainer's state",
}
"""Folder of a checkpoint -> what lies in it, the inner folders first. The root is the model that loads as it is."""


def parts_of(entries: list[Entry]) -> list[tuple[str, str, int]]:
    """(what it is, its folder, bytes) of each part that the checkpoint has; the model's folder is empty."""
    sizes: dict[str, int] = {}
    for entry in entries:
        folder = next((folder for folder in PARTS if entry.path.startswith(folder)), "")
        sizes[folder] = sizes.get(folder, 0) + entry.bytes
    order = ["", "trainer/", *(folder for folder in PARTS if folder != "trainer/")]
    return [(PARTS.get(folder, "model"), folder, sizes[folder]) for folder in order if folder in sizes]


# ---------------------------------------------------------------- verify
def verify(database: Database, store: ArtifactStore, checkpoint_id: uuid.UUID) -> Verification:
    """Read every byte again, compare with the manifest and note the outcome. No transaction is open meanwhile."""
    with database.read() as session:
        checkpoint = get_checkpoint(session, checkpoint_id)
    files(store, checkpoint)
    damage = find_damage(store, checkpoint)
    with database.write() as session:
        outcome = {"state": "damaged"} if damage else {"state": "verified", "verified_at": utc_now()}
        kept = (Checkpoint.id == checkpoint_id, Checkpoint.state != "removed")
        session.execute(update(Checkpoint).where(*kept).values(outcome))
        session.execute(update(Run).where(Run.id == checkpoint.run_id).values(version=Run.version + 1))
        return Verification(session.get_one(Checkpoint, checkpoint_id), damage)


def find_damage(store: ArtifactStore, checkpoint: Checkpoint) -> list[str]:
    """What is missing, extra or changed, compared with the manifest whose hash the journal told."""
    try:
        raw = b"".join(store.read_chunks(f"{checkpoint.path}/{MANIFEST_NAME}"))
    except NotFound:
        return [f"{MANIFEST_NAME} is missing"]
    if hashlib.sha256(raw).hexdigest() != checkpoint.sha256:
        return [f"{MANIFEST_NAME} is not the one that the journal named"]
    try:
        listed = Manifest.model_validate_json(raw).files
    except ValidationError:
        return [f"{MANIFEST_NAME} cannot be read"]
    present = {entry.path: entry.bytes for entry in store.list(checkpoint.path) if entry.path != MANIFEST_NAME}
    damage = [f"{path} is missing" for path in sorted(listed.keys() - present.keys())]
    damage += [f"{path} is not in the manifest" for path in sorted(present.keys() - listed.keys())]
    for path in sorted(listed.keys() & present.keys()):
        if present[path] != listed[path].bytes:
            damage.append(f"{path} has {present[path]} bytes instead of {listed[path].bytes}")
        elif _sha256(store, f"{checkpoint.path}/{path}") != listed[path].sha256:
            damage.append(f"{path} has changed")
    return damage


def _sha256(store: ArtifactStore, key: str) -> str | None:
    digest = hashlib.sha256()
    try:
        for chunk in store.read_chunks(key):
            digest.update(chunk)
    except (BadKey, NotFound):
        return None
    return digest.hexdigest()


# ---------------------------------------------------------------- archive
def archive_size(entries: list[Entry], folder: str) -> int:
    """Bytes of the tar stream that `archive` makes of these files."""
    return sum(len(_header(entry, folder)) + _padded(entry.bytes) for entry in entries) + 2 * _BLOCK


def archive(store: ArtifactStore, checkpoint: Checkpoint, entries: list[Entry], folder: str) -> Iterator[bytes]:
    """The checkpoint as an uncompressed tar below `folder`, a chunk at a time, without a file in between."""
    for entry in entries:
        yield _header(entry, folder)
        yield from store.read_chunks(f"{checkpoint.path}/{entry.path}")
        yield bytes(_padded(entry.bytes) - entry.bytes)
    yield bytes(2 * _BLOCK)


def _header(entry: Entry, folder: str) -> bytes:
    info = tarfile.TarInfo(f"{folder}/{entry.path}")
    info.size = entry.bytes
    info.mode = 0o644
    return info.tobuf(tarfile.PAX_FORMAT)


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK
