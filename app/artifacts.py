"""The artifact store: rollouts, checkpoints and logs by key, on the home's disk or behind any fsspec URL.

A key is a relative path such as `runs/<run>/attempts/1/rollouts/batch-000123.parquet`. Keys are checked before anything
is opened: nothing outside `runs/` can be named, nor reached through a symbolic link.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from app.errors import BadRequest, NotFound
from app.settings import Settings

CHUNK_BYTES = 1 << 20
_SEGMENT = re.compile(r"[A-Za-z0-9._@+=-]+", re.ASCII)
_MAX_KEY = 500


class BadKey(BadRequest):
    """The key names something outside the store."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One file below a key."""

    path: str
    """Relative to the key that was listed."""
    bytes: int


def check_key(key: str) -> str:
    """The key itself when it is a plain relative path below `runs/`; raises BadKey otherwise.

    Refused: empty, `.` and `..` segments, leading slash, backslash, `%`, `#`, `:`, NUL and whatever else is not
    a letter, digit or one of `._@+=-`."""
    segments = key.split("/")
    plain = all(_SEGMENT.fullmatch(segment) and segment.strip(".") for segment in segments)
    if not plain or len(key) > _MAX_KEY or segments[0] != "runs" or len(segments) < 2:
        raise BadKey(f"{key[:100]!r} is not an artifact key.")
    return key


class ArtifactStore:
    """Files by key below one root."""

    def __init__(self, filesystem: Any, root: str) -> None:
        self.filesystem = filesystem
        self.root = root.rstrip("/")
        self.is_local = isinstance(filesystem, LocalFileSystem)

    def path_of(self, key: str) -> str:
        """The file system's own path of a key; symbolic links must stay below the root."""
        path = f"{self.root}/{check_key(key)}"
        if self.is_local and not Path(path).resolve().is_relative_to(Path(self.root).resolve() / "runs"):
            raise BadKey(f"{key[:100]!r} leads outside the artifact store.")
        return path

    def open(self, key: str) -> IO[bytes]:
        """A readable, seekable file. Raises NotFound."""
        path = self.path_of(key)
        try:
            file: IO[bytes] = self.filesystem.open(path, "rb")
        except (FileNotFoundError, IsADirectoryError) as error:
            raise NotFound(f"There is no file {key}; it may have been removed.") from error
        return file

    def read_chunks(self, key: str) -> Iterator[bytes]:
        with self.open(key) as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk

    def exists(self, key: str) -> bool:
        return bool(self.filesystem.isfile(self.path_of(key)))

    def size(self, key: str) -> int:
        path = self.path_of(key)
        try:
            return int(self.filesystem.size(path))
        except FileNotFoundError as error:
            raise NotFound(f"There is no file {key}; it may have been removed.") from error

    def list(self, key: str) -> list[Entry]:
        """All files below a folder's key, sorted by path; empty when there is no such folder."""
        folder = self.path_of(key)
        found = self.filesystem.find(folder, detail=True) if self.filesystem.isdir(folder) else {}
        entries = [Entry(path[len(folder) :].lstrip("/"), int(info["size"])) for path, info in found.items()]
        return sorted(entries, key=lambda entry: entry.path)

    def upload(self, folder: Path, key: str) -> None:
        """Copy a local folder below a key."""
        self.filesystem.put(f"{folder}/", f"{self.path_of(key)}/", recursive=True)

    def remove(self, key: str) -> None:
        """Remove a folder and all below it; one that is not there is no error."""
        path = self.path_of(key)
        if self.filesystem.exists(path):
            self.filesystem.rm(path, recursive=True)

    def local_path(self, key: str) -> Path | None:
        """Where the file lies on this host; None in a remote store."""
        return Path(self.path_of(key)) if self.is_local else None


def open_store(settings: Settings) -> ArtifactStore:
    """The store that COHORT_ARTIFACT_URL names; the home without one."""
    filesystem, root = fsspec.core.url_to_fs(settings.artifact_url or str(settings.home.resolve()))
    return ArtifactStore(filesystem, root)
