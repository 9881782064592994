"""What a supervisor reads from its engine's journal file itself, so that it needs no database to know it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grpo_engine.events import JOURNAL_NAME
from workers.outcome import TERMINAL_EVENTS


class JournalWatch:
    def __init__(self, folder: Path) -> None:
        self.started = False
        """The engine has journaled something."""
        self.terminal: dict[str, Any] | None = None
        """Its last terminal event."""
        self._path = folder / JOURNAL_NAME
        self._offset = 0

    def read(self) -> None:
        """Take in the whole lines that were added."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                lines = file.read().splitlines(keepends=True)
        except FileNotFoundError:
            return
        for line in lines:
            if not line.endswith(b"\n"):
                break
            self._offset += len(line)
            self.started = True
            if any(f'"{kind}"'.encode() in line for kind in TERMINAL_EVENTS):
                self._note_terminal(line)

    def _note_terminal(self, line: bytes) -> None:
        try:
            record = json.loads(line)
        except ValueError:
            return
        if record.get("type") in TERMINAL_EVENTS:
            self.terminal = record
