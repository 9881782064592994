"""Verdicts by content, in memory and on disk: what was once answered is never asked again.

One JSON object a line: {"judge", "key", "value", "reason", "requests", "cost"}. A line is written when its answer
comes, so a killed run loses none; its next attempt reads the lines of all attempts before it. Only answers are kept, no
failures.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from grpo_engine.errors import StorageFull
from grpo_engine.reward.learned.judge_messages import Verdict


def key_of(model: str, messages: Sequence[dict[str, str]]) -> str:
    """Of a request: rubric, question, answer and reference answer stand in its messages."""
    return hashlib.sha256(json.dumps([model, *messages]).encode()).hexdigest()


class JudgeCache:
    """Of one judge on one rank."""

    def __init__(self, judge: str, own: Path | None = None, earlier: Sequence[Path] = ()) -> None:
        """`judge` names the stage and the config of the judge; `own`: file to write, None = memory alone; `earlier`:
        folders with the files of other ranks and attempts, read once, now."""
        self._judge = judge
        self._found: dict[str, Verdict] = {}
        self.num_requests, self.cost = 0, 0.0
        """What this judge's answers on disk took."""
        for folder in earlier:
            for path in sorted(folder.glob("*.jsonl")):
                self._read(path)
        self._file: TextIO | None = None
        if own is not None:
            own.parent.mkdir(parents=True, exist_ok=True)
            self._file = own.open("a", encoding="utf-8")

    def get(self, key: str) -> Verdict | None:
        return self._found.get(key)

    def put(self, key: str, verdict: Verdict, num_requests: int, cost: float) -> None:
        """Raises StorageFull when the file cannot be written."""
        self._found[key] = verdict
        if self._file is None:
            return
        line = {"judge": self._judge, "key": key, **verdict._asdict(), "requests": num_requests, "cost": cost}
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise StorageFull(f"the judge's answers cannot be written to {self._file.name}: {error}") from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _read(self, path: Path) -> None:
        """A line that a kill tore, or that something else wrote, is passed over: its answer will be asked again."""
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row: dict[str, Any] = json.loads(line)
                verdict = Verdict(float(row["value"]), str(row["reason"]))
                key, judge, requests, cost = row["key"], row["judge"], int(row["requests"]), float(row["cost"])
            except (ValueError, TypeError, KeyError):
                continue
            self._found[key] = verdict
            if judge == self._judge:
                self.num_requests, self.cost = self.num_requests + requests, self.cost + cost
