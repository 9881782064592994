"""Engine logs by artifact key: the tail, what came after an offset, plain-text search with context."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass

from app.artifacts import ArtifactStore
from app.errors import NotFound
from app.settings import Settings

MAX_TAIL_BYTES = 1 << 20
MAX_LINE_CHARACTERS = 4000
LOG_NAME = "engine.log"


@dataclass(frozen=True, slots=True)
class LogPiece:
    text: str
    start: int
    """Byte of the log where the text begins."""
    end: int
    """Byte after it: ask for what comes after this one."""
    size: int
    """Bytes of the whole log now."""


@dataclass(frozen=True, slots=True)
class LogHit:
    line_number: int
    """From 1."""
    before: list[str]
    line: str
    after: list[str]


def log_key(run_id: object, attempt: int) -> str:
    """Artifact key of an attempt's log."""
    return f"{Settings.attempt_key(run_id, attempt)}/{LOG_NAME}"


def tail(store: ArtifactStore, key: str, lines: int = 200) -> LogPiece:
    """The last lines, at most 1 MiB. An attempt that has written nothing yet has an empty log."""
    try:
        file = store.open(key)
    except NotFound:
        return LogPiece("", 0, 0, 0)
    with file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - MAX_TAIL_BYTES)
        file.seek(start)
        raw = file.read(size - start)
    kept = raw.splitlines(keepends=True)[-lines:] if lines > 0 else []
    length = sum(map(len, kept))
    if start and kept and length == len(raw):
        length -= len(kept.pop(0))  # its beginning lies before the window
    return LogPiece(b"".join(kept).decode(errors="replace"), size - length, size, size)


def read_after(store: ArtifactStore, key: str, offset: int, max_bytes: int = 256 << 10) -> LogPiece:
    """Whole lines after byte `offset`; an unfinished last line waits for its end."""
    try:
        file = store.open(key)
    except NotFound:
        return LogPiece("", 0, 0, 0)
    with file:
        size = file.seek(0, os.SEEK_END)
        start = min(max(offset, 0), size)
        file.seek(start)
        raw = file.read(max_bytes)
    whole = raw[: raw.rfind(b"\n") + 1] or (raw if len(raw) == max_bytes else b"")
    return LogPiece(whole.decode(errors="replace"), start, start + len(whole), size)


def search(store: ArtifactStore, key: str, text: str, *, context: int = 2, limit: int = 100) -> list[LogHit]:
    """Lines that contain `text`, upper and lower case alike, with the lines around them; the first `limit`."""
    wanted = text.lower()
    before: deque[str] = deque(maxlen=context)
    hits: list[LogHit] = []
    open_hits: list[LogHit] = []
    try:
        file = store.open(key)
    except NotFound:
        return []
    with file:
        for number, raw in enumerate(file, 1):
            line = raw.decode(errors="replace").rstrip("\r\n")[:MAX_LINE_CHARACTERS]
            for hit in open_hits:
                hit.after.append(line)
            open_hits = [hit for hit in open_hits if len(hit.after) < context]
            if wanted in line.lower() and len(hits) < limit:
                hits.append(LogHit(number, list(before), line, []))
                open_hits += hits[-1:] if context else []
            if len(hits) >= limit and not open_hits:
                break
            before.append(line)
    return hits
