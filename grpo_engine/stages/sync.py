"""Weights from trainer to sampler: the one way they go, timed, recorded, and proved where the sampler has a copy."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_engine.errors import EngineError, NonFinite, WeightSyncFailed
from grpo_engine.failures import reason_of
from grpo_engine.protocols import Communicator, Sleeper
from grpo_engine.stages.context import StageContext, log
from grpo_engine.stages.parts import RLParts
from grpo_engine.stages.probe import ProbeResult

SUMMED_AS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes a number -> how its bits are summed."""


@dataclass(slots=True)
class Checksum:
    """Of named tensors as they pass by: SHA-256 over names, shapes and the sum of each tensor's bits as integers.

    The sums are taken where the tensors are; only they come to the host, once, at the end."""

    about: list[tuple[str, list[int]]] = field(default_factory=list)
    sums: list[Tensor] = field(default_factory=list)

    def watch(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same weights, noted."""
        for name, tensor in weights:
            self.about.append((name, list(tensor.shape)))
            bits = tensor.detach().contiguous().view(SUMMED_AS[tensor.element_size()])
            self.sums.append(bits.sum(dtype=torch.int64))
            yield name, tensor

    def hexdigest(self) -> str:
        """16 hexadecimal digits; those of nothing when nothing was read."""
        sums = torch.stack(self.sums).tolist() if self.sums else []
        return hashlib.sha256(json.dumps([self.about, sums]).encode()).hexdigest()[:16]


UNKNOWN = ProbeResult(math.inf, math.inf, 0)


@dataclass(frozen=True, slots=True)
class _Try:
    """One update on one rank, and what the probe said of it."""

    seconds: float
    result: ProbeResult = UNKNOWN
    not_finite: str | None = None
    """Why there was nothing to compare: the policy itself is broken."""
    refused: str | None = None
    """What the sampler raised instead of taking the weights over."""


@dataclass(frozen=True, slots=True)
class _Update:
    """One update on all ranks: the slowest and the worst of them."""

    seconds: float
    result: ProbeResult
    checksum: str
    refused: str | None

    def __str__(self) -> str:
        if self.refused is not None:
            return f"the sampler did not take the weights: {self.refused}"
        return (
            f"log-probabilities of {self.result.num_tokens} probe tokens differ by {self.result.gap_nats:.3g} nats at "
            f"most, and the trainer finds another token likelier by up to {self.result.choice_gap_nats:.3g}"
        )


def send_weights(context: StageContext, parts: RLParts) -> dict[str, float]:
    """Give the sampler the trainer's present weights; metrics by name. Collective.

    A sampler with a copy of its own is probed on every rank: where the probe fails on one, all repeat the update once.
    Raises WeightSyncFailed, on every rank, when it fails again."""
    if parts.probe is None:
        started = time.perf_counter()
        parts.sampler.load_weights(iter(()), parts.learner.policy_version)
        return {"rollout/sync_s": time.perf_counter() - started}
    tolerance = parts.probe.tolerance_nats
    update = _send_and_probe(context.communicator, parts)
    seconds = update.seconds
    repeated = update.result.largest_nats > tolerance
    if repeated:
        context.warn(f"weight update repeated: {update}; {tolerance:g} nats are allowed")
        update = _send_and_probe(context.communicator, parts)
        seconds += update.seconds
    version = parts.learner.policy_version
    context.journal.append(
        "weight_sync", stage=context.key, step=context.progress.step, policy_version=version, checksum=update.checksum,
        seconds=seconds, probe_gap_nats=_finite(update.result.gap_nats),
        choice_gap_nats=_finite(update.result.choice_gap_nats), repeated=repeated,
    )  # fmt: skip
    if update.result.largest_nats > tolerance:
        raise WeightSyncFailed(
            f"after two updates to policy version {version} the sampler still differs from the trainer: {update}; "
            f"rollout.probe.tolerance_nats allows {tolerance:g}; the weights sent have checksum {update.checksum}"
        )
    return {
        "rollout/sync_s": seconds,
        "rollout/probe_gap_nats": update.result.largest_nats,
        "rollout/weight_updates_repeated": float(repeated),
    }


def rest(parts: RLParts) -> None:
    """The trainer works now: a sampler that can gives its memory back until the next weights come."""
    if isinstance(parts.sampler, Sleeper):
        parts.sampler.sleep()


def _send_and_probe(ranks: Communicator, parts: RLParts) -> _Update:
    """Raises NonFinite, on every rank, where one finds the policy broken."""
    checksum = Checksum()
    tries = ranks.gather(_try(parts, checksum))
    if fault := next((one.not_finite for one in tries if one.not_finite is not None), None):
        raise NonFinite(fault)
    return _Update(
        seconds=max(one.seconds for one in tries),
        result=max((one.result for one in tries), key=lambda result: result.largest_nats),
        checksum=ranks.from_first(checksum.hexdigest()),
        refused=next((one.refused for one in tries if one.refused is not None), None),
    )


def _try(parts: RLParts, checksum: Checksum) -> _Try:
    """This rank's update. What has a typed reason of its own, such as a lack of memory, is raised."""
    assert parts.probe is not None
    started = time.perf_counter()
    try:
        parts.sampler.load_weights(checksum.watch(parts.learner.iter_full_weights()), parts.learner.policy_version)
    except Exception as error:
        if isinstance(error, EngineError) or reason_of(error) != EngineError.reason:
            raise
        log.exception("weight update")
        return _Try(time.perf_counter() - started, refused=f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - started
    try:
        return _Try(seconds, parts.probe.measure(parts.sampler))
    except NonFinite as error:
        return _Try(seconds, not_finite=str(error))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
