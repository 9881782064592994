"""Scoring processes for metrics whose libraries may hang: each judges in its main thread and is killed when late.

    Composite -> Pooled.score -> metric.quick, and what that leaves open
                              -> RewardPool.judge -> one chunk at a time to each idle child -> one answer an item

Chunks go only to children that wait for one, so writing never blocks, and a child that ends takes nobody's results with
it: what it had answered is kept, the item it was at is tried once more (never after being late), the rest goes to
others. A new child has a new connection, so answers cannot be mixed up.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_engine.config_rewards import Part
from grpo_engine.errors import RewardError
from grpo_engine.reward.messages import PeerGone, receive, send
from grpo_engine.reward.metric import Judgement, Metric
from grpo_engine.types import Completion, Prompt, RewardPart

START_LIMIT_S = 120.0
"""Wall-clock seconds for a child to start, and to load each metric."""
WALL_FACTOR = 10.0
"""An item may take this many times its processor seconds by the clock, for busy hosts; then it is late all the same."""
MAX_FAILED_STARTS = 3
"""Children in a row that end before they are ready."""
EXIT_GRACE_S = 1.0
"""For a child that closed its connection to end, so that its exit status can be told."""
MAX_CHUNK = 16
LATE, RESTARTS = "reward/late", "reward/pool_restarts"

_PAUSE_S = 0.05
_TRANSFER_LIMIT_S = 30.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

Pair = tuple[Prompt, Completion]


class Pooled:
    """A slow metric as a reward function: what its quick judge leaves open goes to the pool."""

    def __init__(self, metric: Metric, config: Part, pool: RewardPool) -> None:
        self.name, self.weight, self.version = metric.name, metric.weight, metric.version
        self._metric, self._config, self._pool = metric, config, pool

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[RewardPart]:
        pairs = list(zip(prompts, completions, strict=True))
        quick = self._metric.quick
        said = [quick(*pair) if quick else None for pair in pairs]
        left = [pair for pair, judgement in zip(pairs, said, strict=True) if judgement is None]
        slow = iter(self._pool.judge(self._config, self._metric, left) if left else [])
        return [self._part(judgement or next(slow)) for judgement in said]

    def _part(self, said: Judgement) -> RewardPart:
        return RewardPart(self.name, said.value, self.weight, said.explanation, said.span, self.version)


@dataclass
class _Batch:
    """One call of `judge`: what is left to do and what is known."""

    how: dict[str, Any]
    """From which a child makes the metric."""
    metric: Metric
    pairs: Sequence[Pair]
    todo: deque[int]
    said: dict[int, Judgement] = field(default_factory=dict)
    tried: set[int] = field(default_factory=set)
    """Items at which a child ended."""

    def unjudged(self, item: int, why: str) -> None:
        value = self.metric.unjudged_value
        outcome = "it abstains" if value is None else f"it counts as {value:g}"
        self.said[item] = Judgement(value, f"{why}, so {outcome}.")


class RewardPool:
    """Children that judge completions by config and metric. Starts none before the first item.

    Call it from one thread, the main one: children die with the thread that started them."""

    def __init__(self, num_processes: int, child_module: str = "grpo_engine.reward.pool_child") -> None:
        """`child_module`: what `python -m` runs as a child."""
        self._num_processes = num_processes
        self._child_module = child_module
        self._children: list[_Child] = []
        self._counts = {LATE: 0.0, RESTARTS: 0.0}
        self._failed_starts = 0

    def judge(self, config: Part, metric: Metric, pairs: Sequence[Pair]) -> list[Judgement]:
        """One judgement a pair, in order. The child makes the same metric from `config` by its kind, and prepares it.

        Raises RewardError when a child cannot start, or cannot make the metric."""
        how = {"config": config.model_dump(mode="json"), "given": dict(metric.given)}
        batch = _Batch(how, metric, pairs, deque(range(len(pairs))))
        try:
            while len(batch.said) < len(pairs):
                self._keep_busy(batch)
                for child in _readable(self._children):
                    self._take(child, batch)
                for child in [child for child in self._children if child.is_late(metric.time_limit_s)]:
                    self._end_late(child, batch)
        except BaseException:
            self.close()  # what was sent would be answered into the next batch
            raise
        return [batch.said[item] for item in range(len(pairs))]

    def take_counts(self) -> dict[str, float]:
        """Since the last call, by names of the metric catalogue; without those that are 0."""
        counts, self._counts = self._counts, {LATE: 0.0, RESTARTS: 0.0}
        return {name: count for name, count in counts.items() if count}

    def close(self) -> None:
        """End every child. May be called again; the next `judge` starts new ones."""
        while self._children:
            self._children.pop().end()

    @property
    def pids(self) -> list[int]:
        """Of the living children."""
        return [child.process.pid for child in self._children]

    def _keep_busy(self, batch: _Batch) -> None:
        for child in [child for child in self._children if child.has_ended_idle()]:
            self._replace(child, batch)
        wanted = min(self._num_processes, len(batch.todo) + sum(bool(child.items) for child in self._children))
        while len(self._children) < wanted:
            self._children.append(_Child(self._child_module))
        size = max(1, min(MAX_CHUNK, len(batch.pairs) // (4 * self._num_processes)))
        for child in self._children:
            if child.is_ready and not child.items and batch.todo:
                items = [batch.todo.popleft() for _ in range(min(size, len(batch.todo)))]
                child.items.extend(items)
                try:
                    child.ask(batch, items)
                except (PeerGone, TimeoutError):
                    self._lose(child, batch)
                    return

    def _take(self, child: _Child, batch: _Batch) -> None:
        """Whatever the child says next: that it is ready, an answer, or nothing any more."""
        try:
            answer = receive(child.connection, time.monotonic() + _TRANSFER_LIMIT_S)
        except (PeerGone, TimeoutError):
            self._lose(child, batch)
            return
        child.mark()
        if "refused" in answer:
            raise RewardError(answer["refused"])
        if not child.is_ready:
            child.is_ready = True
            return
        self._failed_starts = 0
        item = child.items.popleft()
        if "error" in answer:
            batch.unjudged(item, f"The judge failed with {answer['error']}")
        else:
            value, explanation, span = answer["said"]
            batch.said[item] = Judgement(value, explanation, (span[0], span[1]) if span else None)

    def _end_late(self, child: _Child, batch: _Batch) -> None:
        if not child.is_ready:
            raise RewardError(f"a scoring process was not ready within {START_LIMIT_S:g} s")
        self._counts[LATE] += 1
        batch.unjudged(child.items.popleft(), f"Judging it took longer than {batch.metric.time_limit_s:g} s")
        self._replace(child, batch)

    def _lose(self, child: _Child, batch: _Batch) -> None:
        """The child has ended. An item is given up when it ends a second child."""
        how = self._replace(child, batch, EXIT_GRACE_S)
        if not child.is_ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                raise RewardError(f"scoring processes end while they start ({how}); their error is in the engine's log")
            return
        item = child.items[0] if child.items else None
        if item is None or item not in batch.tried:
            batch.tried.update([] if item is None else [item])
            return
        batch.todo.remove(item)
        batch.unjudged(item, f"Judging it ended two processes ({how})")

    def _replace(self, child: _Child, batch: _Batch, grace_s: float = 0.0) -> str:
        """End it and put back what it was asked and has not answered; `_keep_busy` starts another."""
        self._children.remove(child)
        self._counts[RESTARTS] += 1
        batch.todo.extendleft(reversed(child.items))
        return child.end(grace_s)


class _Child:
    """One scoring process and what it was asked."""

    def __init__(self, module: str) -> None:
        self.connection, theirs = socket.socketpair()
        self.items: deque[int] = deque()
        self.is_ready = False
        """Whether it has loaded what it needs: itself, then each metric that it is asked for."""
        self._made: list[dict[str, Any]] = []
        command = [sys.executable, "-m", module, str(os.getpid()), str(theirs.fileno())]
        # The order of sets of texts inside sympy depends on the hash seed.
        environment = os.environ | {"PYTHONHASHSEED": "0"}
        with theirs:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=2, env=environment, pass_fds=[theirs.fileno()],
                start_new_session=True,
            )  # fmt: skip
        self.mark()

    def ask(self, batch: _Batch, items: Sequence[int]) -> None:
        if batch.how not in self._made:  # it will say when it has loaded that one
            self._made.append(batch.how)
            self.is_ready = False
        pairs = [_as_json(*batch.pairs[item]) for item in items]
        send(self.connection, batch.how | {"pairs": pairs}, time.monotonic() + _TRANSFER_LIMIT_S)
        self.mark()

    def mark(self) -> None:
        """The next item begins now."""
        self._since, self._cpu_since = time.monotonic(), self._cpu_s()

    def has_ended_idle(self) -> bool:
        """Whether it ended, between batches perhaps, while no item of it can be to blame."""
        return self.is_ready and not self.items and self.process.poll() is not None

    def is_late(self, limit_s: float) -> bool:
        elapsed = time.monotonic() - self._since
        if not self.is_ready:
            return elapsed > START_LIMIT_S
        if not self.items or elapsed <= limit_s:
            return False
        return elapsed > limit_s * WALL_FACTOR or self._cpu_s() - self._cpu_since > limit_s

    def _cpu_s(self) -> float:
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text(errors="replace")
        except OSError:  # it has ended; reading its answers will tell
            return 0.0
        user, system = stat[stat.rindex(")") + 2 :].split(" ")[11:13]
        return (int(user) + int(system)) / _TICKS_PER_S

    def end(self, grace_s: float = 0.0) -> str:
        """Kill it after this many seconds, with all it started; how it ended, in words."""
        self.connection.close()
        code = self._code(grace_s)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return "killed" if code is None else f"exit status {code}"

    def _code(self, grace_s: float) -> int | None:
        try:
            return self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            return None


def _readable(children: Sequence[_Child]) -> list[_Child]:
    """Those that have said something, or ended, within a moment."""
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child.connection, selectors.EVENT_READ, child)
        return [key.data for key, _ in selector.select(_PAUSE_S)]


def _as_json(prompt: Prompt, completion: Completion) -> dict[str, Any]:
    """What rule-based judges look at; token ids and log-probabilities stay here."""
    asked = {"id": prompt.id, "text": prompt.text, "columns": prompt.columns}
    return {"prompt": asked, "completion": {"text": completion.text, "finish_reason": completion.finish_reason}}
