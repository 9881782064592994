"""The version of a metric: its name and a hash of the source that decides its values."""

from __future__ import annotations

import hashlib
from pathlib import Path


def version_of(name: str, *sources: bytes) -> str:
    """Example: version_of("accuracy", b"...") == "accuracy@3f9a12c4" (first 8 hex digits of SHA-256)."""
    return f"{name}@{hashlib.sha256(b''.join(sources)).hexdigest()[:8]}"


def module_source(*files: str) -> bytes:
    """The bytes of the modules that a metric consists of, given as their `__file__`."""
    return b"".join(Path(file).read_bytes() for file in files)
