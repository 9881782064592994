"""Tokens wait in a server's engine until their completion ends, since nobody reads them before.

After every step an engine tells its API server of every token of every completion. That costs both of them: of a server
with 64 completions of a 3.4 M model, a quarter of the engine's time and half of the API server's. An answer that is not
streamed needs its tokens at its end, so here they go over together: at the end of the completion, or HOLD_TOKENS at a
time, so that a completion that is aborted from outside lacks no more than those.

`hold_outputs` wraps the two methods of vLLM's engine that make a step; the rest needs no vLLM.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from functools import cache, wraps
from itertools import groupby
from operator import attrgetter, is_
from typing import Any

import numpy as np

HOLD_TOKENS = 16
TOKENS = ("request_id", "new_token_ids", "new_logprobs")
"""Outputs that tell anything else do not wait. A request's first one does: how much of its prompt was cached."""
GAUGES = ("num_running_reqs", "num_waiting_reqs", "num_skipped_waiting_reqs", "step_counter", "current_wave",
          "kv_cache_usage")  # fmt: skip
"""Statistics that the next step tells anew. All others count something, and go over at once."""
ENVELOPE = ("engine_index", "timestamp", "weight_version", "scheduler_stats")

Send = Callable[[int, Any], None]
Step = tuple[dict[int, Any] | None, bool]


@dataclass(slots=True)
class Waiting:
    """What one API server is not told yet."""

    outputs: dict[str, list[Any]] = field(default_factory=dict)
    """By request."""
    weight_version: str | None = None
    """Of the weights that made them."""


class HeldOutputs:
    """The tokens that wait in one engine. `may_wait(request_id)`: nobody reads that request's tokens one by one."""

    def __init__(self, may_wait: Callable[[str], bool], send: Send) -> None:
        """`send` tells an API server something at once."""
        self._may_wait = may_wait
        self._send = send
        self._waiting: defaultdict[int, Waiting] = defaultdict(Waiting)

    def pass_on(self, told: dict[int, Any]) -> dict[int, Any]:
        """Of what a step tells each API server (vLLM's EngineCoreOutputs), that which it is to know now."""
        now = {}
        for server, message in told.items():
            waiting = self._waiting[server]
            if waiting.weight_version != message.weight_version:
                self._send_all(server, waiting, type(message))
                waiting.weight_version = message.weight_version
            message.outputs = [due for output in message.outputs for due in self._due(waiting.outputs, output)]
            if message.outputs or not _is_silent(message):
                now[server] = message
        return now

    def _send_all(self, server: int, waiting: Waiting, kind: type[Any]) -> None:
        """Tokens of other weights go before those of this step."""
        outputs = [part for held in waiting.outputs.values() for part in joined(held)]
        waiting.outputs.clear()
        if outputs:
            self._send(server, kind(outputs=outputs, weight_version=waiting.weight_version))

    def _due(self, waiting: dict[str, list[Any]], output: Any) -> list[Any]:
        """Everything of the request, unless that may wait."""
        held = [*waiting.pop(output.request_id, []), output]
        if len(held) < HOLD_TOKENS and _tells_tokens_alone(output) and self._may_wait(output.request_id):
            waiting[output.request_id] = held
            return []
        return joined(held)


def joined(outputs: list[Any]) -> list[Any]:
    """A request's outputs as one; as several where their steps kept different numbers of tokens.

    The last of each run takes in the others: token ids [T] and log-probabilities [T, W] one after the other."""
    parts = []
    for width, run in groupby(outputs, _width):
        *before, last = run
        if before:
            last.new_token_ids = [token for output in (*before, last) for token in output.new_token_ids]
        if before and width is not None:
            steps = [output.new_logprobs[:3] for output in (*before, last)]
            last.new_logprobs = type(last.new_logprobs)(*map(np.concatenate, zip(*steps, strict=True)))
        parts.append(last)
    return parts


def _width(output: Any) -> int | None:
    """Entries beside each token; None without."""
    return None if output.new_logprobs is None else int(output.new_logprobs[0].shape[-1])


def _tells_tokens_alone(output: Any) -> bool:
    values_of, blank = _blank(output.__class__, ("", ()), TOKENS)
    return all(map(is_, values_of(output), blank))


def _is_silent(message: Any) -> bool:
    """It tells of no request, and counts nothing."""
    values_of, blank = _blank(message.__class__, (), ("outputs", *ENVELOPE))
    if not all(map(is_, values_of(message), blank)):
        return False
    stats = message.scheduler_stats
    untouched = None if stats is None else type(stats)()
    return stats is None or all(
        getattr(stats, each.name) == getattr(untouched, each.name) for each in fields(stats) if each.name not in GAUGES
    )


@cache
def _blank(
    kind: type[Any], required: tuple[Any, ...], apart_from: tuple[str, ...]
) -> tuple[Callable[[Any], Iterable[Any]], list[Any]]:
    """How to read the fields of such a struct apart from some, and what they are in one that tells nothing: None or
    small numbers, which are always the same object. Asked for at every step of every completion."""
    names = [name for name in kind.__struct_fields__ if name not in apart_from]
    values_of: Callable[[Any], Iterable[Any]] = attrgetter(*names, names[0])  # two names at least give a tuple
    return values_of, list(values_of(kind(*required)))


# ---------------------------------------------------------------- in vLLM's engine
def hold_outputs() -> None:
    """From now on, in this process."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.core import EngineCoreProc

    def held_of(engine: Any) -> HeldOutputs:
        """Made with the engine's first step."""

        def may_wait(request_id: str) -> bool:
            request = engine.scheduler.requests.get(request_id)
            params = None if request is None else request.sampling_params
            # Stop texts are looked for by the API server, which ends the request in the engine.
            return params is not None and params.output_kind == RequestOutputKind.FINAL_ONLY and not params.stop

        if not hasattr(engine, "cohort_held"):
            engine.cohort_held = HeldOutputs(may_wait, lambda *told: engine.output_queue.put_nowait(told))
        held: HeldOutputs = engine.cohort_held
        return held

    def holding(step: Callable[[Any], Step]) -> Callable[[Any], Step]:
        @wraps(step)
        def held_step(engine: Any) -> Step:
            told, executed = step(engine)
            return told and held_of(engine).pass_on(told), executed

        return held_step

    EngineCoreProc.step = holding(EngineCoreProc.step)
    EngineCoreProc.step_with_batch_queue = holding(EngineCoreProc.step_with_batch_queue)
