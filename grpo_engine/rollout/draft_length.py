"""How many tokens to draft, learned while decoding. Torch-free: numbers in, a number out.

The length in force is the one with the most tokens a second, E(K) / t(K): what a row gains on average by a step of K
drafts (rollout/acceptance.py) over the seconds of the step.

t(K) is learned for each size of the batch apart, because that decides whether verifying is nearly free (few rows: the
weights are read once for all tokens) or as dear as decoding. A size is a number of rows and how many tokens the longest
of them has: in a call of a few hundred tokens a plain step can take twice as long at the end as at the beginning, and a
probe at the beginning must not be compared with the end of the call before.

Lengths that are not in force are probed for a few steps now and then, and only a probe changes the length in force: it
compares two lengths that were both timed just before. What was timed long ago, perhaps while others kept the machine
busy, only tells what a probe would cost. That (its time less what the length in force would have taken for the same
tokens) is paid from a credit, a hundredth of all decoding time: a length that is nearly as good is looked at often, a
dear one seldom, but none is ever forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil, log2
from statistics import median

from grpo_engine.config_rollout import Drafts
from grpo_engine.rollout.acceptance import Acceptance

PROBE_SHARE = 0.01
"""Of decoding time: what probes may lose."""
START_STEPS = 2
"""Steps' worth of credit with which a batch size begins."""
PROBE_STEPS = 4
"""Steps of one probe."""
FEW_TOKENS = 64
"""Rows up to this long are of one size."""
WATCH_STEPS = 16
"""Steps after which what a length takes is no longer certain."""
WINDOW_STEPS = 16
"""So many of the latest steps decide what a step takes."""
SETTLED_STEPS = 8
"""Steps of the length in force, without a pause, before another may be compared with it."""
CHANGE_GAIN = 1.02
"""Another length must promise this much more to replace the one in force."""


def draft_lengths(drafts: Drafts, max_tokens: int, *, deterministic: bool) -> list[int]:
    """Lengths to choose from, rising, none longer than `max_tokens`, the drafter's longest; a single one is fixed.

    Deterministic runs have one, since a choice by time cannot be repeated.
    """
    if drafts.fixed_tokens is not None or deterministic:
        return [min(drafts.fixed_tokens or drafts.min_tokens, max_tokens)]
    shortest = min(drafts.min_tokens, max_tokens)
    return [0] * drafts.allow_zero + list(range(shortest, min(drafts.max_tokens, max_tokens) + 1))


class Seconds:
    """What a step takes: the median of the latest ones, since hiccups of the machine lengthen a few of them much."""

    def __init__(self, seconds: float, step: int) -> None:
        """`step`: when, in steps of the decoder."""
        self._latest = deque([seconds], maxlen=WINDOW_STEPS)
        self.usual = seconds
        self.last_step = step
        self.num_fresh = 1
        """Steps since the last pause."""

    def is_stale(self, step: int) -> bool:
        """The last one was long before `step`."""
        return step - self.last_step > WATCH_STEPS

    def add(self, seconds: float, step: int) -> None:
        """Of the steps before a pause only the last one counts on."""
        if self.is_stale(step):
            self._latest = deque([self._latest[-1]], maxlen=WINDOW_STEPS)
            self.num_fresh = 0
        self._latest.append(seconds)
        self.usual = median(self._latest)
        self.last_step = step
        self.num_fresh += 1


@dataclass(frozen=True, slots=True)
class Size:
    """Of a batch; both numbers count doublings."""

    rows: int
    """Up to 1, 2, 4, 8, ... rows."""
    half_tokens: int
    """Halves of doublings: the longest row has up to 64, 90, 128, 181, 256, ... tokens; fewer cost much the same."""

    @staticmethod
    def of(num_rows: int, num_tokens: int) -> Size:
        """`num_tokens`: of the longest row."""
        return Size(ceil(log2(num_rows)), ceil(2 * log2(max(num_tokens, FEW_TOKENS))))

    def distance(self, other: Size) -> tuple[int, int]:
        """Rows first."""
        return abs(self.rows - other.rows), abs(self.half_tokens - other.half_tokens)


@dataclass(slots=True)
class Bucket:
    """What is known about batches of one size."""

    in_force: int
    """The best length so far."""
    borrowed: dict[int, float] = field(default_factory=dict)
    """Seconds by length as the nearest size knows them; they serve until measured here, in proportion to what was."""
    credit: float = 0.0
    """Seconds that probes may still lose."""
    measured: dict[int, Seconds] = field(default_factory=dict)
    returning: Seconds | None = None
    """Of first drafts after plain steps, which also pay for what the drafter has to catch up with."""
    has_started: bool = False
    """It was given the credit with which a size begins."""
    has_compared: bool = False
    """The length in force was found better than another here."""
    probed: int | None = None
    probe_steps_left: int = 0

    def seconds(self, length: int) -> float | None:
        """Of a step with `length` drafts; None = not known."""
        if length in self.measured:
            return self.measured[length].usual
        return self.borrowed.get(length)

    def known(self) -> dict[int, float]:
        """Seconds by length."""
        return self.borrowed | {length: seconds.usual for length, seconds in self.measured.items()}

    def add(self, length: int, seconds: float, step: int) -> float:
        """A step with `length` drafts took `seconds`. Returns what such steps usually take."""
        if length in self.measured:
            self.measured[length].add(seconds, step)
        else:
            ratio = seconds / self.borrowed.get(length, seconds) if not self.measured else 1.0
            self.borrowed = {other: known * ratio for other, known in self.borrowed.items()}
            self.measured[length] = Seconds(seconds, step)
        return self.measured[length].usual

    def add_return(self, seconds: float, step: int) -> float:
        """The first drafts after plain steps took `seconds`. Returns what they usually take."""
        if self.returning is None:
            self.returning = Seconds(seconds, step)
        else:
            self.returning.add(seconds, step)
        return self.returning.usual

    def last_step(self, length: int) -> int:
        """When `length` was timed last; -1 = never."""
        return self.measured[length].last_step if length in self.measured else -1

    def is_settled(self, step: int) -> bool:
        """The length in force was timed often enough of late for another to be compared with it."""
        seconds = self.measured.get(self.in_force)
        return seconds is not None and not seconds.is_stale(step) and seconds.num_fresh >= SETTLED_STEPS

    def is_due(self, length: int, step: int) -> bool:
        """Never timed here, or long ago."""
        return length not in self.measured or self.measured[length].is_stale(step)


class DraftLength:
    """Chooses among `lengths` (rising, 0 = plain decoding); with a single one, always that.

    Once a step `choose` is asked, then `observe` is told about the same step. Raises ValueError without a length.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        if not lengths:
            raise ValueError("there is no draft length to choose from")
        self._lengths = list(lengths)
        self._acceptance = Acceptance()
        self._buckets: dict[Size, Bucket] = {}
        self._bucket = Bucket(self._lengths[0])
        self._num_steps = 0
        self._previous = self._lengths[0]

    @property
    def is_fixed(self) -> bool:
        """True: time decides nothing."""
        return len(self._lengths) == 1

    def choose(self, num_rows: int, num_tokens: int) -> int:
        """Drafts of the next step of a batch of `num_rows`, the longest of which has `num_tokens`."""
        if self.is_fixed:
            return self._lengths[0]
        self._go_to(Size.of(num_rows, num_tokens))
        bucket = self._bucket
        if bucket.probe_steps_left == 0:
            self._end_probe(bucket)
            self._begin_probe(bucket)
        if bucket.probed is None:
            return bucket.in_force
        bucket.probe_steps_left -= 1
        return bucket.probed

    def observe(self, length: int, reached: Sequence[int], seconds: float) -> None:
        """A step with `length` drafts took `seconds`; `reached[d]` rows had their first d drafts accepted,
        d = 0 ... length."""
        returning = self._previous == 0 and length > 0
        if returning:
            self._acceptance.fade()
        self._acceptance.add(reached)
        if self.is_fixed:
            return
        bucket = self._bucket
        self._num_steps += 1
        add = bucket.add_return if returning else partial(bucket.add, length)
        usual = add(seconds, self._num_steps)
        self._previous = length
        bucket.credit += PROBE_SHARE * usual
        if bucket.probed == length:
            bucket.credit -= max(0.0, self._lost_seconds(bucket, length, min(seconds, usual)))
        elif bucket.is_settled(self._num_steps) and not bucket.has_started:
            bucket.has_started = True
            bucket.credit += START_STEPS * usual

    def plain_seconds(self) -> float | None:
        """What a step without drafts takes with such a batch; None = never measured."""
        return self._bucket.seconds(0)

    # ------------------------------------------------------------ choosing
    def _go_to(self, size: Size) -> None:
        if size not in self._buckets:
            self._buckets[size] = Bucket(self._lengths[0])
        bucket = self._buckets[size]
        if bucket is self._bucket:
            return
        self._bucket.probed, self._bucket.probe_steps_left = None, 0
        self._bucket = bucket
        if not bucket.has_compared:
            timed = [other for other, known in self._buckets.items() if known.measured]
            wise = [other for other in timed if self._buckets[other].has_compared]
            nearest = self._buckets[min(wise or timed, key=size.distance, default=size)]
            bucket.in_force, bucket.borrowed = nearest.in_force, nearest.known()

    def _end_probe(self, bucket: Bucket) -> None:
        """What was probed comes into force if it is better. Both were just timed; no others are compared, since the
        machine may have become faster or slower since they were."""
        if bucket.probed in bucket.measured:
            bucket.has_compared = True
            tokens, now = self._acceptance.expected_tokens, bucket.in_force
            rates = [tokens(length) / bucket.measured[length].usual for length in (bucket.probed, now)]
            if rates[0] > CHANGE_GAIN * rates[1]:
                bucket.in_force, bucket.credit = bucket.probed, max(0.0, bucket.credit)
        bucket.probed = None

    def _begin_probe(self, bucket: Bucket) -> None:
        """Try a neighbour of the length in force, plain decoding or the shortest draft, if one is due and can be
        paid."""
        if not bucket.is_settled(self._num_steps):
            return
        place = self._lengths.index(bucket.in_force)
        near = {*self._lengths[max(0, place - 1) : place + 2], *self._lengths[:2]} - {bucket.in_force}
        for length in sorted(near, key=bucket.last_step):
            if bucket.is_due(length, self._num_steps) and self._probe_cost(bucket, length) <= bucket.credit:
                bucket.probed, bucket.probe_steps_left = length, PROBE_STEPS
                return

    def _probe_cost(self, bucket: Bucket, length: int) -> float:
        """Seconds that a probe of `length` loses against the length in force."""
        # Where nothing is known: between free verification and verification as dear as decoding.
        guess = bucket.known()[bucket.in_force] * (2 + length) / (2 + bucket.in_force)
        return PROBE_STEPS * self._lost_seconds(bucket, length, bucket.seconds(length) or guess)

    def _lost_seconds(self, bucket: Bucket, length: int, seconds: float) -> float:
        """Of the `seconds` of a step with `length` drafts: more than the length in force takes for its tokens."""
        expected, now = self._acceptance.expected_tokens, bucket.in_force
        return seconds - bucket.known()[now] * expected(length) / expected(now)
