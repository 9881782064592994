"""Processes that stay: each side of a comparison loads its model once and measures whenever it is told to, so that
sides can take turns (A B A B …) without being started anew.

A command and its answer are one line of JSON each. Answers carry a mark, since libraries print to the same output.
Torch-free: every environment imports it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from benchmarks.peers import ROOT

if TYPE_CHECKING:
    from benchmarks.processes import Side

Job = dict[str, Any]
Measure = Callable[[Job], Job]
MARK = "@answer "
SECONDS_TO_END = 60


class Standing:
    """One side's process, ready when made. Raises RuntimeError with its last words when it ends by itself."""

    def __init__(self, side: Side) -> None:
        self.name = side.name
        self._scratch = tempfile.TemporaryDirectory()
        folder = Path(self._scratch.name)
        (folder / "job.json").write_text(json.dumps(side.job))
        self._errors = folder / "errors.log"
        threads = str(side.job.get("threads", 1))
        environment = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [*side.command, str(folder / "job.json")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=errors, text=True, cwd=ROOT, env=environment,
            )  # fmt: skip
        try:
            self.about = self._answer()
        except BaseException:
            self.close()
            raise

    def ask(self, **order: Any) -> Job:
        """What the process measured by this order."""
        pipe: IO[str] | None = self._process.stdin
        assert pipe is not None
        pipe.write(json.dumps(order) + "\n")
        pipe.flush()
        return self._answer()

    def close(self) -> None:
        """End it by closing its input; by force when it does not listen."""
        try:
            self._process.communicate(timeout=SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._scratch.cleanup()

    def __enter__(self) -> Standing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self) -> Job:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                answer: Job = json.loads(line.removeprefix(MARK))
                return answer
        status = self._process.wait()
        raise RuntimeError(f"{self.name} ended with {status}: {self._errors.read_text(errors='replace')[-2000:]}")


def take_turns(sides: Sequence[Side], repetitions: int, *, warm_up: Job) -> list[list[Job]]:
    """Every side warms up once, then A B A B …, `repetitions` times; one list of answers a side."""
    answers: list[list[Job]] = [[] for _ in sides]
    with ExitStack() as stack:
        standing = [stack.enter_context(Standing(side)) for side in sides]
        for process in standing:
            process.ask(number=0, **warm_up)
        for number in range(1, repetitions + 1):
            for process, own in zip(standing, answers, strict=True):
                own.append(process.ask(number=number))
                print(f"  {process.name}: {told(own[-1])}", flush=True)
    return answers


def told(answer: Job) -> str:
    """Example: told({"tokens": 100, "seconds": 2}) == "100 tokens, 50 a second"."""
    return f"{answer['tokens']:,} tokens, {answer['tokens'] / answer['seconds']:,.0f} a second"


# ---------------------------------------------------------------- the other end
def serve(start: Callable[[Job], AbstractContextManager[Measure]]) -> None:
    """Answer orders until the input is closed; the job is in the file that the first argument names."""
    job = json.loads(Path(sys.argv[1]).read_text())
    with start(job) as measure:
        _tell({"ready": True})
        for line in sys.stdin:
            _tell(measure(json.loads(line)))


def _tell(answer: Job) -> None:
    print("\n" + MARK + json.dumps(answer), flush=True)
