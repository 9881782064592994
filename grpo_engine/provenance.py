"""What code is running: git commit and package versions, for journal and checkpoints. Torch-free."""

from __future__ import annotations

import platform
import subprocess
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("cohort", "torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "reasoning-gym")


@lru_cache(maxsize=1)
def git_commit() -> str | None:
    """Commit of the checkout this file belongs to; None when it was installed without one or git is missing."""
    here = Path(__file__)
    # An installed copy may lie inside somebody else's repository.
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    return _git(here.parent, "rev-parse", "HEAD")


@lru_cache(maxsize=1)
def package_versions() -> dict[str, str]:
    """Example: package_versions()["torch"] == "2.13.0+cpu"."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
