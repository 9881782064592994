"""How fast programs are judged in the sandbox, and what one that hangs costs the others. Torch-free."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.results import Row, Spread
from grpo_engine.config_rewards import CodeExecutionReward, SandboxConfig
from grpo_engine.reward.code_execution import CodeExecution, metric
from grpo_engine.reward.sandbox import CheckJob, Job, Outcome, SandboxPool, open_pool
from grpo_engine.types import Completion, Prompt

NUM_PROGRAMS = 256
BATCH = 128
LIMIT_S = 5.0
_PROGRAM = """Keep what is near the mean.

```python
def near(numbers, width):
    mean = sum(numbers) / len(numbers)
    kept = [number for number in numbers if abs(number - mean) <= width + {extra}]
    return sorted(kept)
```
"""
_HANGS = "```python\ndef near(numbers, width):\n    while True:\n        pass\n```"
_TESTS = [
    "assert near([1, 2, 3], 1) == [1, 2, 3]",
    "assert near([10, 0, 5], 0) == [5]",
    "assert near([2.5], 0.5) == [2.5]",
    "assert near([0, 0, 9], 1) == []",
]


class Counted:
    """A pool that keeps the outcomes of the last batch."""

    def __init__(self, pool: SandboxPool) -> None:
        self.pool = pool
        self.outcomes: list[Outcome] = []

    def run_all(self, jobs: Sequence[Job]) -> list[Outcome]:
        self.outcomes = self.pool.run_all(jobs)
        return self.outcomes


def sandbox_programs(rounds: int) -> list[Row]:
    """Complete verdicts on NUM_PROGRAMS different programs, half of them wrong, two sandboxed processes each."""
    with _warm() as (code, runner):
        measured = []
        for _ in range(rounds):
            started = time.perf_counter()
            values = _score(code, _programs(NUM_PROGRAMS))
            wall_s = time.perf_counter() - started
            assert values == [1.0, 0.0] * (NUM_PROGRAMS // 2), "the sandbox judged a program wrongly"
            measured.append(sum(outcome.num_processes for outcome in runner.outcomes) / wall_s)
        tier, slots = runner.pool.tier, runner.pool.num_slots
    rate = Spread(measured)
    limit = f"a bare fork, exit and wait of a small Python process: {_bare_forks():,.0f}/s on one core"
    notes = (
        f"tier {tier}, {slots} slots; {rate.median / 2:.1f} complete verdicts/s: program found, tests made, both "
        "run apart and confined, four cases compared, sentence written"
    )
    return [
        Row("sandbox_programs", rate.median, None, "processes/s", limit, 100, spread={"ours": measured}, notes=notes)
    ]


def hung_program(rounds: int) -> list[Row]:
    """Seconds that a batch takes longer when one program of it never ends: at its first, middle and last place."""
    places = {"first": 0, "middle": BATCH // 2, "last": BATCH - 1}
    with _warm() as (code, _):
        without = [_timed(code, _programs(BATCH)) for _ in range(rounds)]
        usual_s = Spread(without).median
        longer: dict[str, list[float]] = {}
        for name, place in places.items():
            programs = [_HANGS if at == place else text for at, text in enumerate(_programs(BATCH))]
            longer[name] = [_timed(code, programs) - usual_s for _ in range(rounds)]
    worst = max(Spread(values).median for values in longer.values())
    notes = f"a batch of {BATCH} takes {usual_s:.2f} s without it; the worst place of three is the row's figure"
    limit = f"its time limit of {LIMIT_S:g} s, which nobody can know to be hopeless before"
    return [Row("hung_program", worst, None, "s longer", limit, LIMIT_S, better="less", spread=longer, notes=notes)]


@contextmanager
def _warm() -> Iterator[tuple[CodeExecution, Counted]]:
    """The metric over a pool whose slots have each run something."""
    with open_pool(SandboxConfig()) as pool:
        pool.run_all([CheckJob("x = 1", "__report__(True, '')")] * 4 * pool.num_slots)
        runner = Counted(pool)
        yield metric(CodeExecutionReward(time_limit_s=LIMIT_S), runner), runner


def _programs(count: int) -> list[str]:
    """Different ones, so that none is judged by another's outcome; every second is wrong."""
    return [_PROGRAM.format(extra=f"1e-{at + 12}" if at % 2 == 0 else f"{at + 1}") for at in range(count)]


def _score(code: CodeExecution, texts: Sequence[str]) -> list[float | None]:
    prompt = Prompt("near", 0, "Write near(numbers, width).", [], {"test_list": _TESTS})
    answers = [Completion([], text, "stop", [], []) for text in texts]
    return [part.value for part in code.score([prompt] * len(answers), answers)]


def _timed(code: CodeExecution, texts: Sequence[str]) -> float:
    started = time.perf_counter()
    _score(code, texts)
    return time.perf_counter() - started


def _bare_forks(count: int = 200) -> float:
    started = time.perf_counter()
    for _ in range(count):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    return count / (time.perf_counter() - started)
