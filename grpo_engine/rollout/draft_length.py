"""How many tokens to draft, learned while decoding. Torch-free: numbers in, a number out.

A step that drafts K tokens gains one token and every draft accepted before the first refusal. With a_d the share of
drafts accepted at depth d among those whose predecessors were (Leviathan et al., arXiv:2211.17192, section 3.3, with
one acceptance for each depth), a row gains on average

    E(K) = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_K   tokens,

and the length in force is the one with the most tokens a second, E(K) / t(K). t(K), the seconds of a step, is learned
for each size of the batch apart, because that decides whether verifying is nearly free (few rows: the weights are
read once for all tokens) or as dear as decoding. The shares a_d belong to policy and drafter and are learned over all.

Lengths that are not in force are probed for a few steps now and then. What probing costs (its time less that which
the best length would have taken for the same tokens) is paid from a credit, a hundredth of all decoding time: a length
that is nearly as good is looked at often, a dear one seldom, but none is ever forgotten. The credit is counted in steps
of the length in force, so that neither a slow first step nor a hiccup buys any.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from grpo_engine.config_rollout import Drafts

PROBE_SHARE = 0.01
"""Of decoding time: what probes may lose."""
START_STEPS = 4
"""Steps' worth of credit with which a batch size begins."""
PROBE_STEPS = 3
"""Steps of one probe."""
WATCH_STEPS = 16
"""Steps after which a measured length is worth another look."""
WINDOW_TRIALS = 256.0
"""About as many of the latest drafts decide what acceptance is at a depth."""
RETURN_TRIALS = 32.0
"""Of the drafts before a pause; the policy has changed since."""
WINDOW_STEPS = 16
"""So many of the latest steps decide what a step takes."""
TRUSTED_STEPS = 2
"""Steps that must be timed before a length is left alone so long."""
STALE_STEPS = 4
"""So many of the steps before a length was left alone still count."""
PRIOR_ACCEPTANCE = 0.6
PRIOR_TRIALS = 4.0
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


@dataclass(slots=True)
class Acceptance:
    """Shares of drafts accepted at each depth, given that the ones before were, over the latest drafts."""

    hits: dict[int, float] = field(default_factory=dict)
    trials: dict[int, float] = field(default_factory=dict)

    def add(self, reached: Sequence[int]) -> None:
        """`reached[d]`: rows whose first d drafts were all accepted, d = 0 ... K."""
        for depth in range(1, len(reached)):
            trials = self.trials.get(depth, 0.0) + reached[depth - 1]
            hits = self.hits.get(depth, 0.0) + reached[depth]
            fade = min(1.0, WINDOW_TRIALS / max(trials, 1.0))
            self.trials[depth], self.hits[depth] = trials * fade, hits * fade

    def fade(self) -> None:
        """Drafts stayed away: what was accepted before counts like the latest RETURN_TRIALS at most."""
        for depth, trials in self.trials.items():
            share = min(1.0, RETURN_TRIALS / max(trials, 1.0))
            self.trials[depth], self.hits[depth] = trials * share, self.hits[depth] * share

    def expected_tokens(self, length: int) -> float:
        """E(length). A depth without drafts is taken to be like the one before it."""
        total, reached, share = 1.0, 1.0, PRIOR_ACCEPTANCE
        for depth in range(1, length + 1):
            hits, trials = self.hits.get(depth, 0.0), self.trials.get(depth, 0.0)
            share = (hits + PRIOR_TRIALS * share) / (trials + PRIOR_TRIALS)
            reached *= share
            total += reached
        return total


class Seconds:
    """What a step takes: the median of the latest ones, since hiccups of the machine lengthen a few of them much."""

    def __init__(self, seconds: float) -> None:
        self._latest = deque([seconds], maxlen=WINDOW_STEPS)
        self.usual = seconds

    @property
    def num_steps(self) -> int:
        return len(self._latest)

    def add(self, seconds: float, *, stale: bool) -> None:
        """`stale`: the last step of this kind was long ago."""
        while stale and len(self._latest) > STALE_STEPS:
            self._latest.popleft()
        self._latest.append(seconds)
        self.usual = median(self._latest)


@dataclass(slots=True)
class Bucket:
    """What is known about batches of one size."""

    borrowed: dict[int, float]
    """Seconds by length as the nearest size knew them when this one was first seen; they serve until measured here,
    in proportion to what was measured."""
    measured: dict[int, Seconds] = field(default_factory=dict)
    returning: Seconds | None = None
    """Of first drafts after plain steps, which also pay for what the drafter has to catch up with."""
    last_step: dict[int, int] = field(default_factory=dict)
    num_steps: int = 0
    credit: float = 0.0
    """Steps of the length in force that probes may still lose."""
    in_force: int | None = None
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

    def add(self, length: int, seconds: float) -> float:
        """A step with `length` drafts took `seconds`. Returns what such steps usually take."""
        if not self.measured:
            self.credit = START_STEPS
        if length in self.measured:
            stale = self.num_steps - self.last_step[length] > WATCH_STEPS
            self.measured[length].add(seconds, stale=stale)
        else:
            ratio = seconds / self.borrowed.get(length, seconds) if not self.measured else 1.0
            self.borrowed = {other: known * ratio for other, known in self.borrowed.items()}
            self.measured[length] = Seconds(seconds)
        self.last_step[length] = self.num_steps
        return self.measured[length].usual

    def add_return(self, seconds: float) -> float:
        """The first drafts after plain steps took `seconds`. Returns what they usually take."""
        if self.returning is None:
            self.returning = Seconds(seconds)
        else:
            self.returning.add(seconds, stale=False)
        return self.returning.usual

    def is_due(self, length: int) -> bool:
        """Measured too little here, or long ago."""
        if length not in self.measured or self.measured[length].num_steps < TRUSTED_STEPS:
            return True
        return self.num_steps - self.last_step[length] >= WATCH_STEPS


class DraftLength:
    """Chooses among `lengths` (rising, 0 = plain decoding); with a single one, always that.

    `choose` and `observe` are called in turn, once a step. Raises ValueError without a length.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        if not lengths:
            raise ValueError("there is no draft length to choose from")
        self._lengths = list(lengths)
        self._acceptance = Acceptance()
        self._buckets: dict[int, Bucket] = {}
        self._previous = self._lengths[0]

    @property
    def is_fixed(self) -> bool:
        """True: time decides nothing."""
        return len(self._lengths) == 1

    def choose(self, num_rows: int) -> int:
        """Drafts of the next step of a batch of `num_rows`."""
        if self.is_fixed:
            return self._lengths[0]
        bucket = self._bucket(num_rows)
        if bucket.probe_steps_left == 0:
            bucket.probed = None
            bucket.in_force = self._best(bucket)
            self._begin_probe(bucket, bucket.in_force)
        if bucket.probed is None:
            return self._lengths[0] if bucket.in_force is None else bucket.in_force
        bucket.probe_steps_left -= 1
        return bucket.probed

    def observe(self, num_rows: int, length: int, reached: Sequence[int], seconds: float) -> None:
        """A step of `num_rows` with `length` drafts took `seconds`; `reached[d]` rows had their first d drafts
        accepted, d = 0 ... length."""
        returning = self._previous == 0 and length > 0
        if returning:
            self._acceptance.fade()
        self._acceptance.add(reached)
        if self.is_fixed:
            return
        bucket = self._bucket(num_rows)
        bucket.num_steps += 1
        usual = bucket.add_return(seconds) if returning else bucket.add(length, seconds)
        self._previous = length
        if bucket.in_force is not None:
            bucket.credit += PROBE_SHARE * usual / bucket.known()[bucket.in_force]
            if bucket.probed == length:
                bucket.credit -= max(0.0, self._lost_steps(bucket, bucket.in_force, length, min(seconds, usual)))

    def plain_seconds(self, num_rows: int) -> float | None:
        """What a step without drafts takes with so many rows; None = never measured."""
        return None if self.is_fixed else self._bucket(num_rows).seconds(0)

    # ------------------------------------------------------------ choosing
    def _best(self, bucket: Bucket) -> int | None:
        known = bucket.known()
        if not known:
            return None
        rates = {length: self._acceptance.expected_tokens(length) / seconds for length, seconds in known.items()}
        best = max(rates, key=lambda length: rates[length])
        now = bucket.in_force
        return now if now in rates and rates[best] < CHANGE_GAIN * rates[now] else best

    def _begin_probe(self, bucket: Bucket, best: int | None) -> None:
        """Try a neighbour of the best length, plain decoding or the shortest draft, if one is due and can be paid."""
        if best is None:
            return
        place = self._lengths.index(best)
        near = {*self._lengths[max(0, place - 1) : place + 2], *self._lengths[:2]} - {best}
        for length in sorted(near, key=lambda length: bucket.last_step.get(length, -1)):
            if bucket.is_due(length) and self._probe_cost(bucket, best, length) <= bucket.credit:
                bucket.probed, bucket.probe_steps_left = length, PROBE_STEPS
                return

    def _probe_cost(self, bucket: Bucket, best: int, length: int) -> float:
        """Steps that a probe of `length` loses against the best."""
        # Between free verification and verification as dear as decoding, where nothing is known or one step is.
        guess = bucket.known()[best] * (2 + length) / (2 + best)
        seconds = bucket.seconds(length) or guess
        if length in bucket.measured and bucket.measured[length].num_steps < TRUSTED_STEPS:
            seconds = min(seconds, guess)
        return PROBE_STEPS * self._lost_steps(bucket, best, length, seconds)

    def _lost_steps(self, bucket: Bucket, best: int, length: int, seconds: float) -> float:
        """Steps of the best length in the time that a step with `length` drafts loses, taking `seconds`."""
        expected = self._acceptance.expected_tokens
        return seconds / bucket.known()[best] - expected(length) / expected(best)

    def _bucket(self, num_rows: int) -> Bucket:
        """Sizes up to 1, 2, 4, 8, ... rows."""
        size = (num_rows - 1).bit_length()
        if size not in self._buckets:
            nearest = min(self._buckets, key=lambda other: abs(other - size), default=None)
            borrowed = {} if nearest is None else self._buckets[nearest].known()
            self._buckets[size] = Bucket(borrowed)
        return self._buckets[size]
