"""`cohort` as typed, in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.cli import main
from app.settings import get_settings

Typed = Callable[..., tuple[int, str, str]]


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Typed]:
    """Runs `cohort` with these words on a home of its own; exit status, output, error output."""
    monkeypatch.setenv("COHORT_HOME", str(tmp_path / "home"))
    for name in ("COHORT_URL", "COHORT_TOKEN", "COHORT_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    get_settings.cache_clear()

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["cohort", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capfd.readouterr()
        return int(ended.value.code or 0), shown.out, shown.err

    yield run
    get_settings.cache_clear()
