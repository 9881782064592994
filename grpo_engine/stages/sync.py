"""Weights from trainer to sampler: the one way they go, timed, recorded, and proved where the sampler has a copy."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_engine.errors import NonFinite, WeightSyncFailed
from grpo_engine.protocols import Communicator, Sleeper
from grpo_engine.stages.context import StageContext
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


@dataclass(frozen=True, slots=True)
class _Try:
    """One update on one rank and what the probe said of it; `fault` in its place when numbers were not finite."""

    seconds: float
    result: ProbeResult | None = None
    fault: str | None = None


def send_weights(context: StageContext, parts: RLParts) -> dict[str, float]:
    """Give the sampler the trainer's present weights; metrics by name. Collective.

    A sampler with a copy of its own is probed on every rank: where the probe fails on one, all repeat the update once.
    Raises WeightSyncFailed, on every rank, when it fails again."""
    if parts.probe is None:
        started = time.perf_counter()
        parts.sampler.load_weights(iter(()), parts.learner.policy_version)
        return {"rollout/sync_s": time.perf_counter() - started}
    tolerance = parts.probe.tolerance_nats
    worst, checksum, seconds = _send_and_probe(context.communicator, parts)
    repeated = worst.largest_nats > tolerance
    if repeated:
        context.warn(f"weight update repeated: {_figures(worst)}, {tolerance:g} are allowed")
        worst, checksum, again_s = _send_and_probe(context.communicator, parts)
        seconds += again_s
    version = parts.learner.policy_version
    context.journal.append(
        "weight_sync", stage=context.key, step=context.progress.step, policy_version=version, checksum=checksum,
        seconds=seconds, probe_gap_nats=_finite(worst.gap_nats), choice_gap_nats=_finite(worst.choice_gap_nats),
        repeated=repeated,
    )  # fmt: skip
    if worst.largest_nats > tolerance:
        raise WeightSyncFailed(
            f"after two updates to policy version {version} the sampler still differs from the trainer: "
            f"{_figures(worst)}, rollout.probe.tolerance_nats allows {tolerance:g}; the weights sent have checksum "
            f"{checksum}"
        )
    return {
        "rollout/sync_s": seconds,
        "rollout/probe_gap_nats": worst.largest_nats,
        "rollout/weight_updates_repeated": float(repeated),
    }


def rest(parts: RLParts) -> None:
    """The trainer works now: a sampler that can gives its memory back until the next weights come."""
    if isinstance(parts.sampler, Sleeper):
        parts.sampler.sleep()


def _send_and_probe(ranks: Communicator, parts: RLParts) -> tuple[ProbeResult, str, float]:
    """One update everywhere: the worst probe of all ranks, the checksum of what rank 0 sent, the slowest's seconds."""
    checksum = Checksum()
    started = time.perf_counter()
    parts.sampler.load_weights(checksum.watch(parts.learner.iter_full_weights()), parts.learner.policy_version)
    seconds = time.perf_counter() - started
    assert parts.probe is not None
    try:
        mine = _Try(seconds, parts.probe.measure(parts.sampler))
    except NonFinite as error:
        mine = _Try(seconds, fault=str(error))
    tries = ranks.gather(mine)
    if fault := next((one.fault for one in tries if one.fault is not None), None):
        raise NonFinite(fault)
    results = [one.result for one in tries if one.result is not None]
    worst = max(results, key=lambda result: result.largest_nats)
    return worst, checksum.hexdigest(), max(one.seconds for one in tries)


def _figures(result: ProbeResult) -> str:
    return (
        f"log-probabilities of {result.num_tokens} probe tokens differ by {result.gap_nats:.3g} nats at most, and the "
        f"trainer finds another token likelier by up to {result.choice_gap_nats:.3g}"
    )


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None
