"""The choice of draft lengths on simulated machines, whose best length is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from grpo_engine.config_rollout import Drafts
from grpo_engine.rollout.draft_length import DraftLength, draft_lengths

LENGTHS = [0, 2, 3, 4, 5]
TOKENS = 100
"""Of the longest row, where that does not matter."""


@dataclass(frozen=True)
class Machine:
    """Seconds of a step: reading the weights once, computing each token, drafting each token."""

    weights_s: float = 1.0
    token_s: float = 0.02
    draft_s: float = 0.1
    shares: Sequence[float] = (0.8, 0.7, 0.6, 0.5, 0.4)

    def seconds(self, rows: int, length: int) -> float:
        return self.weights_s + rows * self.token_s * (length + 1) + self.draft_s * length

    def tokens(self, length: int) -> float:
        return float(1 + np.cumprod(self.shares[:length]).sum())

    def rate(self, rows: int, length: int) -> float:
        return self.tokens(length) / self.seconds(rows, length)

    def best(self, rows: int) -> int:
        return max(LENGTHS, key=lambda length: self.rate(rows, length))


@dataclass
class Decoding:
    controller: DraftLength
    seed: int = 0
    hiccups: float = 0.0
    """Share of steps that take five times as long."""

    def run(self, machine: Machine, rows: int, steps: int) -> tuple[Counter[int], float]:
        """(chosen lengths, expected tokens a second against the best length's)."""
        random = np.random.default_rng(self.seed)
        chosen = Counter[int]()
        for _ in range(steps):
            length = self.controller.choose(rows, TOKENS)
            accepted = np.cumprod(random.random((rows, length)) < machine.shares[:length], axis=1)
            duration = machine.seconds(rows, length) * random.uniform(0.9, 1.1)
            duration *= 5 if random.random() < self.hiccups else 1
            self.controller.observe(length, [rows, *accepted.sum(axis=0).tolist()], duration)
            chosen[length] += 1
        tokens = sum(machine.tokens(length) * count for length, count in chosen.items())
        seconds = sum(machine.seconds(rows, length) * count for length, count in chosen.items())
        return chosen, tokens / seconds / machine.rate(rows, machine.best(rows))


# ---------------------------------------------------------------- what is learned
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_few_rows_decode_about_as_fast_as_with_the_best_length(rows: int, seed: int) -> None:
    decoding = Decoding(DraftLength(LENGTHS), seed)
    machine = Machine(token_s=0.005)
    assert machine.best(rows) > 2
    decoding.run(machine, rows, 200)
    assert decoding.run(machine, rows, 1000)[1] > 0.95


@pytest.mark.parametrize("seed", range(5))
def test_one_clearly_best_length_is_taken_nearly_always(seed: int) -> None:
    decoding = Decoding(DraftLength(LENGTHS), seed)
    machine = Machine(shares=(0.95, 0.95, 0.95, 0.1, 0.1))
    decoding.run(machine, 8, 200)
    assert machine.best(8) == 3
    assert decoding.run(machine, 8, 1000)[0][3] > 800


@pytest.mark.parametrize("token_s", [0.05, 0.5])
def test_many_rows_decode_without_drafts_and_lose_little_by_probing(token_s: float) -> None:
    decoding = Decoding(DraftLength(LENGTHS))
    machine = Machine(token_s=token_s)
    assert machine.best(128) == 0
    assert decoding.run(machine, 128, 256)[1] > 0.96
    chosen, speed = decoding.run(machine, 128, 2000)
    assert speed > 0.985
    assert chosen[2] > 3


@pytest.mark.parametrize("seed", range(5))
def test_drafts_come_back_when_acceptance_rises_and_go_when_it_falls(seed: int) -> None:
    """The second best length is 0.955 times as fast as the best: to stay there is not enough."""
    decoding = Decoding(DraftLength(LENGTHS), seed)
    poor = Machine(shares=(0.05,) * 5)
    good = replace(poor, shares=(0.95,) * 5)
    assert decoding.run(poor, 8, 400)[0][0] > 350
    assert decoding.run(good, 8, 500)[1] > 0.85
    assert decoding.run(good, 8, 200)[1] > 0.965
    assert decoding.run(poor, 8, 300)[0][0] > 210


def test_a_machine_that_becomes_slow_at_verifying_is_noticed() -> None:
    decoding = Decoding(DraftLength(LENGTHS))
    fast = Machine(token_s=0.001)
    slow = replace(fast, token_s=2.0)
    assert decoding.run(fast, 8, 400)[0][0] < 40
    assert decoding.run(slow, 8, 600)[0][0] > 300


def test_each_size_of_the_batch_has_its_own_length() -> None:
    decoding = Decoding(DraftLength(LENGTHS))
    machine = Machine(token_s=0.05)
    for rows in (128, 1, 128, 1):
        decoding.run(machine, rows, 300)
    assert decoding.run(machine, 128, 100)[0][0] > 90
    assert decoding.run(machine, 1, 100)[0][0] < 10


@pytest.mark.parametrize(("rows", "tokens"), [(4, TOKENS), (8, 10 * TOKENS)])
def test_a_new_size_begins_with_what_the_nearest_one_learned(rows: int, tokens: int) -> None:
    decoding = Decoding(DraftLength(LENGTHS))
    machine = Machine(shares=(0.95, 0.95, 0.95, 0.1, 0.1))
    decoding.run(machine, 8, 300)
    assert decoding.controller.choose(rows, tokens) == 3


def plain_gain(controller: DraftLength, random: np.random.Generator) -> float:
    """What plain decoding would have taken for a call's 128 tokens over what was taken: 128 rows grow from 100 tokens
    on, a plain step takes 25 ms at first and 50 at the end, one with drafts always more than these are worth."""
    done, taken, plain, speed = 0.0, 0.0, 0.0, random.uniform(1.0, 1.3)
    while done < 128:
        length, slow = controller.choose(128, 100 + int(done)), speed * (1 + done / 128)
        seconds = slow * 25 if length == 0 else slow * 25 * (1.2 + 1.3 * length) + 10 * length
        reached = [round(128 * 0.93**depth) for depth in range(length + 1)]
        controller.observe(length, reached, seconds * random.uniform(0.9, 1.1))
        gained = sum(reached) / 128
        done, taken, plain = done + gained, taken + seconds, plain + slow * 25 * gained
    return plain / taken


@pytest.mark.parametrize("seed", range(8))
def test_drafts_at_the_beginning_of_a_call_are_not_compared_with_the_end_of_the_last_one(seed: int) -> None:
    controller, random = DraftLength(LENGTHS), np.random.default_rng(seed)
    plain_gain(controller, random)
    gains = [plain_gain(controller, random) for _ in range(20)]
    assert min(gains) > 0.85
    assert np.mean(gains) > 0.985


def test_one_hiccup_does_not_change_the_length() -> None:
    decoding = Decoding(DraftLength(LENGTHS))
    machine = Machine(shares=(0.95, 0.95, 0.95, 0.1, 0.1))
    decoding.run(machine, 8, 300)
    decoding.controller.observe(3, [8, 8, 8, 8], 1000.0)
    assert decoding.run(machine, 8, 60)[0][3] > 40


@pytest.mark.parametrize("seed", range(5))
def test_hiccups_do_not_make_plain_decoding_look_dear(seed: int) -> None:
    """Drafts lose a seventh, one step in thirty takes five times as long: means of a few steps are off by more."""
    machine = Machine(weights_s=0.0, token_s=0.01, draft_s=0.2, shares=(0.95, 0.93, 0.9, 0.85, 0.8))
    decoding = Decoding(DraftLength(LENGTHS), seed, hiccups=1 / 30)
    assert 0.8 < machine.rate(100, 2) / machine.rate(100, 0) < 0.9
    decoding.run(machine, 100, 130)
    assert decoding.run(machine, 100, 1000)[1] > 0.97


def test_what_a_drafter_catches_up_with_does_not_make_drafts_look_dear() -> None:
    """The first draft after plain steps takes 3 s, every other 1.1 s for half a token more."""
    controller, before = DraftLength([0, 2]), 0
    for _ in range(20):
        length = controller.choose(8, TOKENS)
        controller.observe(length, [8, 4, 0][: length + 1], 1.0 if not length else 1.1 if before else 3.0)
        before = length
    assert controller.choose(8, TOKENS) == 2


def test_what_a_drafter_catches_up_with_is_paid_from_the_credit() -> None:
    """Drafts lose an eighth; the first ones after plain steps take as long as twenty of those besides."""
    controller, tokens, seconds, before = DraftLength([0, 2]), 0.0, 0.0, 0
    for _ in range(4000):
        length = controller.choose(64, TOKENS)
        took = 1.0 if length == 0 else 3.2 + 20 * (before == 0)
        reached = [64, 60, 56][: length + 1]
        controller.observe(length, reached, took)
        tokens, seconds, before = tokens + sum(reached) / 64, seconds + took, length
    assert tokens / seconds > 0.97


def settled_at_2(plain_s: float) -> DraftLength:
    """After 100 steps: two drafts, all accepted, take 3 s, a plain step `plain_s`."""
    controller = DraftLength([0, 2])
    steps(controller, 100, {0: plain_s, 2: 3.0})
    return controller


def steps(controller: DraftLength, count: int, seconds: dict[int, float], tokens: int = TOKENS) -> list[int]:
    """The lengths chosen, of 8 rows that accept every draft."""
    chosen = []
    for _ in range(count):
        chosen.append(controller.choose(8, tokens))
        controller.observe(chosen[-1], [8] * (chosen[-1] + 1), seconds[chosen[-1]])
    return chosen


def test_one_look_at_a_length_that_became_fast_is_enough() -> None:
    controller = settled_at_2(plain_s=2.0)
    chosen = steps(controller, 80, {0: 0.5, 2: 3.0})
    look = chosen.index(0)
    assert set(chosen[:look]) == {2}
    assert set(chosen[look:]) == {0}


def test_after_a_pause_a_length_is_timed_anew_before_another_is_compared_with_it() -> None:
    """Meanwhile the machine became ten times slower; plain decoding looks fast by what it took before."""
    controller = settled_at_2(plain_s=2.0)
    steps(controller, 50, {0: 20.0, 2: 30.0}, tokens=1000)
    assert set(steps(controller, 8, {0: 20.0, 2: 30.0})) == {2}


def test_a_probe_that_was_broken_off_decides_nothing() -> None:
    controller = settled_at_2(plain_s=2.0)
    while controller.choose(8, TOKENS) == 2:
        controller.observe(2, [8, 8, 8], 3.0)
    controller.observe(0, [8], 0.5)
    steps(controller, 50, {0: 2.0, 2: 3.0}, tokens=1000)
    assert set(steps(controller, 8, {0: 2.0, 2: 3.0})) == {2}


def test_drafts_are_tried_as_soon_as_plain_decoding_is_known() -> None:
    assert steps(DraftLength([0, 2]), 9, {0: 2.0, 2: 3.0}) == [0] * 8 + [2]


def test_a_size_that_calls_soon_leave_takes_what_its_neighbour_learned() -> None:
    """Eight steps of each call are too few to compare anything."""
    controller = DraftLength([0, 2])
    for _ in range(2):
        first = steps(controller, 8, {0: 2.0, 2: 3.0}, tokens=100)
        steps(controller, 50, {0: 4.0, 2: 5.0}, tokens=300)
    assert set(first) == {2}


def test_a_slow_first_step_is_forgotten() -> None:
    controller = DraftLength(LENGTHS)
    controller.observe(controller.choose(8, TOKENS), [8], 50.0)
    machine = Machine(token_s=1.0)
    assert Decoding(controller).run(machine, 8, 300)[0][0] > 270


# ---------------------------------------------------------------- what is fixed
def test_a_single_length_is_never_left_and_time_is_never_asked() -> None:
    controller = DraftLength([3])
    assert Decoding(controller).run(Machine(token_s=9.0), 64, 200)[0] == {3: 200}
    assert controller.plain_seconds() is None


def test_where_plain_decoding_is_not_allowed_it_is_never_probed() -> None:
    decoding = Decoding(DraftLength([2, 3]))
    assert decoding.run(Machine(token_s=9.0), 64, 500)[0][0] == 0
    assert decoding.controller.plain_seconds() is None


def test_an_empty_list_of_lengths_is_refused() -> None:
    with pytest.raises(ValueError, match="no draft length"):
        DraftLength([])


@pytest.mark.parametrize(
    ("settings", "deterministic", "expected"),
    [
        ({}, False, [0, 2, 3, 4, 5]),
        ({"allow_zero": False, "max_tokens": 3}, False, [2, 3]),
        ({}, True, [2]),
        ({"fixed_tokens": 4}, True, [4]),
        ({"fixed_tokens": 9}, False, [6]),
        ({"min_tokens": 7, "max_tokens": 9}, False, [0, 6]),
    ],
)
def test_the_lengths_follow_the_config(settings: dict[str, int], deterministic: bool, expected: list[int]) -> None:
    drafts = Drafts.model_validate(settings)
    assert draft_lengths(drafts, 6, deterministic=deterministic) == expected
