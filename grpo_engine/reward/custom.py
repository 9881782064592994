"""Custom: a user's own reward function, given as source text, with TRL's signature, in a process of its own."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from grpo_engine.errors import RewardError
from grpo_engine.reward.messages import PeerGone, receive, send
from grpo_engine.reward.versions import version_of
from grpo_engine.types import Completion, Prompt, RewardFault, RewardPart

LOADING_LIMIT_S = 120.0
"""Wall-clock seconds for a source to be loaded: it may import a model library."""
EXIT_GRACE_S = 1.0
"""For a process that closed its connection to end, so that its exit status can be told."""
LATE = "reward/late"
"""Completions that were not judged in time, by name in the metric catalogue."""


class Custom:
    """Calls `f(completions, **columns) -> list[float | None]` once for all completions, in a child process.

    The function gets `completions` (text), `prompts` (text), `completion_ids` and every dataset column, each a list
    with one item a completion; a function without **kwargs gets only what it names. None or NaN abstains. An exception,
    a list of the wrong length, a process that ends or is late make every completion of the call abstain with the error
    as its explanation; a late process is killed and a new one started for the next call. Generators of random numbers
    are seeded with the batch, so equal batches get equal values.

    Raises:
        RewardError: the source has a syntax error, fails to run, or does not hold exactly one candidate function.
    """

    def __init__(self, name: str, weight: float, source: str, time_limit_s: float = 60.0) -> None:
        self.name = name
        self.weight = weight
        self.version = version_of(name, source.encode())
        self._source = source
        self._source_name = name
        self.time_limit_s = time_limit_s
        self._late = 0
        self._faults: dict[str, RewardFault] = {}
        self._child: _Child | None = _Child(name, source)

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[RewardPart]:
        deadline = time.monotonic() + self.time_limit_s
        try:
            reply = self._ask(prompts, completions, deadline)
        except TimeoutError:
            self._end_child()
            self._late += len(completions)
            fault = f"{self.name} took longer than {self.time_limit_s:g} s for {len(completions)} completions"
            return self._all_abstain(completions, "too late", f"{fault}; its process was ended")
        except PeerGone:
            how = self._end_child(EXIT_GRACE_S)
            return self._all_abstain(completions, "process ended", f"{self.name} ended its process ({how})")
        except RewardError as error:
            return self._all_abstain(completions, "cannot be loaded", str(error))
        if "values" not in reply:
            return self._all_abstain(completions, reply["kind"], reply["error"])
        for _, explanation, kind in reply["values"]:
            if kind is not None:
                self._fault(kind, explanation)
        return [self._part(value, explanation) for value, explanation, _ in reply["values"]]

    def take_counts(self) -> dict[str, float]:
        late, self._late = self._late, 0
        return {LATE: float(late)} if late else {}

    def take_faults(self) -> list[RewardFault]:
        faults, self._faults = list(self._faults.values()), {}
        return faults

    def close(self) -> None:
        self._end_child()

    def _ask(self, prompts: Sequence[Prompt], completions: Sequence[Completion], deadline: float) -> dict[str, Any]:
        if self._child is None:
            self._child = _Child(self._source_name, self._source)
            deadline = time.monotonic() + self.time_limit_s
        child = self._child
        arguments = arguments_of(prompts, completions, child.wanted)
        request = {"arguments": arguments, "count": len(completions), "seed": _seed(prompts, completions)}
        send(child.connection, request, deadline)
        reply: dict[str, Any] = receive(child.connection, deadline)
        return reply

    def _end_child(self, grace_s: float = 0.0) -> str:
        child, self._child = self._child, None
        return child.end(grace_s) if child is not None else ""

    def _all_abstain(self, completions: Sequence[Completion], kind: str, fault: str) -> list[RewardPart]:
        self._fault(kind, f"{fault}.")
        return [self._part(None, f"{fault}.") for _ in completions]

    def _fault(self, kind: str, message: str) -> None:
        self._faults.setdefault(kind, RewardFault(self.name, kind, message))

    def _part(self, value: float | None, explanation: str) -> RewardPart:
        return RewardPart(self.name, value, self.weight, explanation, None, self.version)


class _Child:
    """A process that has loaded the source. Raises RewardError when it cannot."""

    def __init__(self, name: str, source: str) -> None:
        self.connection, theirs = socket.socketpair()
        command = [sys.executable, "-m", "grpo_engine.reward.custom_child", str(os.getpid()), str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()], start_new_session=True
            )
        try:
            self.wanted = self._load(name, source)
        except BaseException:
            self.end()
            raise

    def _load(self, name: str, source: str) -> list[str] | None:
        deadline = time.monotonic() + LOADING_LIMIT_S
        try:
            send(self.connection, {"name": name, "source": source}, deadline)
            reply = receive(self.connection, deadline)
        except TimeoutError:
            raise RewardError(f"reward {name!r} was not loaded within {LOADING_LIMIT_S:g} s") from None
        except PeerGone:
            raise RewardError(
                f"reward {name!r} ended its process while it was loaded ({self.end(EXIT_GRACE_S)})"
            ) from None
        if "error" in reply:
            raise RewardError(f"reward {name!r}: {reply['error']}")
        wanted: list[str] | None = reply["ready"]
        return wanted

    def end(self, grace_s: float = 0.0) -> str:
        """Kill it, after this many seconds, and all it started in its session; how it ended, in words."""
        self.connection.close()
        try:
            code = self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            code = None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if code is None:
            return "killed"
        return f"exit status {code}" if code >= 0 else signal.Signals(-code).name


def arguments_of(
    prompts: Sequence[Prompt], completions: Sequence[Completion], wanted: list[str] | None
) -> dict[str, list[Any]]:
    """What the function is called with: a list an argument, one item a completion. `wanted`: the names it takes."""
    names = sorted({column for prompt in prompts for column in prompt.columns})
    arguments: dict[str, list[Any]] = {name: [prompt.columns.get(name) for prompt in prompts] for name in names}
    arguments["prompts"] = [prompt.text for prompt in prompts]
    arguments["completions"] = [completion.text for completion in completions]
    arguments["completion_ids"] = [completion.token_ids for completion in completions]
    return arguments if wanted is None else {name: arguments[name] for name in wanted if name in arguments}


def _seed(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> int:
    """Of the batch: below 2^32, which is what NumPy takes."""
    batch = [[prompt.id, completion.token_ids] for prompt, completion in zip(prompts, completions, strict=True)]
    return int.from_bytes(hashlib.blake2b(json.dumps(batch).encode(), digest_size=4).digest(), "big")
