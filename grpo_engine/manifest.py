"""A checkpoint's `manifest.json`: where it comes from, and size and SHA-256 of every file. Torch-free.

The manifest is written last; a folder without one is not a checkpoint. `verify` before use.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grpo_engine.config_sources import ModelConfig
from grpo_engine.errors import CheckpointInvalid

MANIFEST_NAME = "manifest.json"


class FileEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class AdapterBase(BaseModel):
    """What the adapter of a LoRA checkpoint lies on: the checkpoint holds no weights of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base: str
    """Folder of the base as trained, or `tiny_llama`."""
    base_sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """`model.adapters.base_hash` of it."""
    model: ModelConfig
    seed: int
    """With `model` what makes the base again."""


class Manifest(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    format: Literal[1] = 1
    stage: str
    """Index and kind of the stage, such as `1-rl`."""
    step: int = Field(ge=0)
    """Optimizer steps done in that stage."""
    policy_version: int = Field(ge=0)
    created_at: datetime
    config_hash: str
    parent: str | None = None
    """manifest_sha256 or path of the checkpoint the run started from."""
    data_versions: dict[str, str] = Field(default_factory=dict)
    reward_versions: dict[str, str] = Field(default_factory=dict)
    git_commit: str | None = None
    package_versions: dict[str, str] = Field(default_factory=dict)
    adapter: AdapterBase | None = None
    """Set in a LoRA checkpoint: the root has no weights then."""
    metrics: dict[str, float | None] = Field(default_factory=dict)
    """Last values of the step; null when not finite."""
    files: dict[str, FileEntry]
    """Path inside the folder, with forward slashes; every file but the manifest itself."""


def list_files(folder: Path) -> dict[str, FileEntry]:
    """Size and hash of every file below `folder` but the manifest."""
    return {name: _entry(folder / name) for name in sorted(_names(folder)) if name != MANIFEST_NAME}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write and fsync `manifest.json`."""
    with open(folder / MANIFEST_NAME, "w", encoding="utf-8") as file:
        file.write(manifest.model_dump_json(indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """Raises CheckpointInvalid when there is none or it cannot be read as one. Does not look at the files."""
    path = folder / MANIFEST_NAME
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except OSError as error:
        raise CheckpointInvalid(f"{path}: {error.strerror}; a folder without its manifest is no checkpoint") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointInvalid(f"{path}: {where or 'content'}: {first['msg']}") from error


def verify(folder: Path) -> Manifest:
    """Read every byte and compare. Raises CheckpointInvalid naming the first file that is missing, extra or changed."""
    manifest = read_manifest(folder)
    present = {name for name in _names(folder) if name != MANIFEST_NAME}
    for name in sorted(manifest.files.keys() - present):
        raise CheckpointInvalid(f"{folder / name} is missing; the manifest lists it")
    for name in sorted(present - manifest.files.keys()):
        raise CheckpointInvalid(f"{folder / name} is not in the manifest")
    for name, expected in manifest.files.items():
        _compare(folder / name, expected)
    return manifest


def _compare(path: Path, expected: FileEntry) -> None:
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            raise CheckpointInvalid(f"{path} has {size} bytes; the manifest says {expected.bytes}")
        if _entry(path) != expected:
            raise CheckpointInvalid(f"{path} has changed: its SHA-256 is not the manifest's")
    except OSError as error:
        raise CheckpointInvalid(f"{path} cannot be read: {error.strerror}") from error


def manifest_sha256(folder: Path) -> str:
    """SHA-256 of manifest.json; it stands for the whole checkpoint, since it lists every file's hash."""
    return hashlib.sha256((folder / MANIFEST_NAME).read_bytes()).hexdigest()


def total_bytes(folder: Path) -> int:
    """Size of the checkpoint by its manifest, the manifest included."""
    listed = sum(entry.bytes for entry in read_manifest(folder).files.values())
    return listed + (folder / MANIFEST_NAME).stat().st_size


def _names(folder: Path) -> Iterator[str]:
    for directory, subfolders, names in os.walk(folder):
        # os.walk does not enter a linked folder, so the link itself must be seen.
        links = [name for name in subfolders if (Path(directory) / name).is_symlink()]
        for name in [*names, *links]:
            yield (Path(directory) / name).relative_to(folder).as_posix()


def _entry(path: Path) -> FileEntry:
    if path.is_symlink() or not path.is_file():
        raise CheckpointInvalid(f"{path} is not a regular file")
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return FileEntry(bytes=path.stat().st_size, sha256=digest.hexdigest())
