"""Early stopping on twelve reward traces whose stop step is stated, for both rules."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from grpo_engine.config import EarlyStoppingConfig
from grpo_engine.diagnostics.early_stopping import Decision, EarlyStopper
from grpo_engine.events import EarlyStopping

NUM_STEPS = 300
_RANDOM = random.Random(7)
NOISE = [_RANDOM.gauss(0, 0.04) for _ in range(NUM_STEPS + 1)]

# name: (mean reward at step t = 1, 2, 3 …; stop step of the literal rule; of the plateau rule); warmup_steps 10,
# patience 1, window_steps 20, min_improvement 0.001. None = never within 300 steps. By hand:
TRACES: dict[str, tuple[Callable[[int], float], int | None, int | None]] = {
    # improvement 0 from t = 6 on; armed at 11. Plateau: first full window at 20, all slopes 0.
    "constant": (lambda t: 0.5, 11, 20),
    # s_t - s_{t-5} tends to 0.05 and s stays below 3, so improvement > 0.05 / 3. Every slope is 0.01 or more.
    "linear rise": (lambda t: 0.01 * t, None, None),
    # 0.8 from t = 30. Plateau: at 45 the window has 16 equal values, 120 of 190 slopes are 0, and the bound has rank
    # (190 + 1.645 sqrt((17100 - 8880) / 18)) / 2 = 112.6 < 120; at 44 it is 114.1 with only 105 zeros.
    "plateau after rise": (lambda t: min(0.2 + 0.02 * t, 0.8), 78, 45),
    # A healthy run, 0.2 to 0.8 in 300 steps, noise 0.04: the literal rule stops it at once, the plateau rule never.
    "noisy healthy": (lambda t: 0.2 + 0.6 * t / 300 + NOISE[t], 12, None),
    # s_t = 0.8 - 0.6 * 0.9^(t-8), improvement = 0.6 * 0.9^(t-13) * (1 - 0.9^5) / s_{t-5} < 0.001 when
    # 0.9^(t-13) < 0.00325, t - 13 > 54.4. Plateau: at 23 the window has 5 low and 15 high values, 10 + 105 zeros,
    # rank (190 + 1.645 sqrt((17100 - 300 - 7350) / 18)) / 2 = 113.8 < 115; at 22 only 15 + 91 are.
    "step": (lambda t: 0.2 if t <= 8 else 0.8, 68, 23),
    # Falls all the time: negative improvement whenever armed.
    "decay": (lambda t: 1.0 - 0.002 * t, 11, 20),
    # Falls from 0.76 to 0.40 at every tenth step; s_13 is the first armed one below s_{t-5}. The two teeth of a window
    # rise far more often than they fall.
    "sawtooth": (lambda t: 0.4 + 0.04 * (t % 10), 13, None),
    # -1.98 rising to -1 at t = 50, where s lags by 0.179; then 0.40951 * 0.179 * 0.9^(t-55) < 0.001 |s_{t-5}| at
    # t - 55 > 40.7. Plateau: as above, 50 + 15.
    "negative rewards": (lambda t: -2.0 + 0.02 * min(t, 50), 96, 65),
    # 0 / max(0, 0.1) = 0: no division by zero.
    "zero": (lambda t: 0.0, 11, 20),
    # Steps 11-15 have no reward and are passed over: constant, the first armed reward is at 16, the 20th at 25.
    "NaN gap": (lambda t: math.nan if 11 <= t <= 15 else 0.5, 16, 25),
    # 0.4, 0.6, 0.4 … s starts at 0.4 and tends to 0.5 -+ 0.0053; odd against even alternate in sign, at 19 the
    # drift no longer outweighs that. Plateau: 90 of 190 slopes are 0, 55 positive, and the bound falls among the zeros.
    "oscillation": (lambda t: 0.5 + 0.1 * (-1) ** t, 19, 20),
    # 1 - s_t = 0.9 c exp(-t/40) with c = 0.1 / (1 - 0.9 exp(1/40)) = 1.295; improvement = 0.1552 exp(-t/40) / s_{t-5}
    # < 0.001 at t > 202.1. Plateau: the bound is a slope near the window's start.
    "slow saturation": (lambda t: 1 - 0.9 * math.exp(-t / 40), 203, 254),
}


def config(**changes: Any) -> EarlyStoppingConfig:
    return EarlyStoppingConfig.model_validate({"warmup_steps": 10, "window_steps": 20, "mode": "stop"} | changes)


def decisions(stopper: EarlyStopper, reward: Callable[[int], float], steps: range) -> list[Decision | None]:
    return [stopper.update(step, reward(step)) for step in steps]


def stop_step(settings: EarlyStoppingConfig, reward: Callable[[int], float]) -> int | None:
    all_steps = decisions(EarlyStopper(settings), reward, range(1, NUM_STEPS + 1))
    return next((decision.step for decision in all_steps if decision and decision.would_stop), None)


@pytest.mark.parametrize("name", TRACES)
def test_the_literal_rule_stops_where_it_was_calculated(name: str) -> None:
    reward, literal, _ = TRACES[name]
    assert stop_step(config(rule="literal"), reward) == literal


@pytest.mark.parametrize("name", TRACES)
def test_the_plateau_rule_stops_where_it_was_calculated(name: str) -> None:
    reward, _, plateau = TRACES[name]
    assert stop_step(config(rule="plateau"), reward) == plateau


@pytest.mark.parametrize("rule", ["literal", "plateau"])
@pytest.mark.parametrize("name", TRACES)
def test_a_run_resumed_in_mid_window_decides_the_same(name: str, rule: str) -> None:
    reward, settings = TRACES[name][0], config(rule=rule, patience=3)
    whole = decisions(EarlyStopper(settings), reward, range(1, 101))
    for cut in (1, 4, 13, 17, 29):
        first, second = EarlyStopper(settings), EarlyStopper(settings)
        before = decisions(first, reward, range(1, cut + 1))
        second.restore(json.loads(json.dumps(first.state())))
        assert before + decisions(second, reward, range(cut + 1, 101)) == whole


def test_smoothing_and_improvement_follow_the_formula() -> None:
    stopper = EarlyStopper(config())
    rewards = [1.0, 0.0, 1.0, 0.5, 0.2, 0.8]
    smoothed = [1.0, 0.9, 0.91, 0.869, 0.8021, 0.80189]
    last = None
    for step, (reward, expected) in enumerate(zip(rewards, smoothed, strict=True), start=1):
        last = stopper.update(step, reward)
        assert last is not None
        assert last.smoothed_reward == pytest.approx(expected, rel=1e-12)
    assert last is not None
    assert last.improvement == pytest.approx((0.80189 - 1.0) / 1.0, rel=1e-12)


def test_small_levels_are_measured_against_a_tenth() -> None:
    stopper = EarlyStopper(config())
    *_, last = [stopper.update(step, 0.0 if step == 1 else 0.01) for step in range(1, 7)]
    assert last is not None
    assert last.improvement == pytest.approx(0.01 * (1 - 0.9**5) / 0.1, rel=1e-12)


def test_patience_counts_consecutive_weak_steps_only_while_armed() -> None:
    stopper = EarlyStopper(config(patience=3))
    seen = [stopper.update(step, 0.5 if step != 12 else 5.0) for step in range(1, 12)]
    assert [decision.patience_left for decision in seen if decision] == [3] * 10 + [2]
    better = stopper.update(12, 5.0)
    assert better is not None
    assert better.patience_left == 3


def test_only_mode_stop_ends_the_run_and_the_operator_can_change_it() -> None:
    stopper = EarlyStopper(config(mode="observe"))
    seen = [stopper.update(step, 0.5) for step in range(1, 12)]
    assert seen[-1] is not None
    assert (seen[-1].would_stop, seen[-1].stops) == (True, False)
    stopper.override("stop")
    after = stopper.update(12, 0.5)
    assert after is not None
    assert (after.mode, after.stops) == ("stop", True)


def test_an_override_that_is_taken_back_leaves_the_configs_mode_even_after_a_resume() -> None:
    first, second = EarlyStopper(config(mode="observe")), EarlyStopper(config(mode="observe"))
    first.override("stop")
    second.restore(first.state())
    assert second.mode == "stop"
    second.override(None)
    assert second.mode == "observe"


def test_a_run_that_never_had_a_reward_has_no_decision() -> None:
    stopper = EarlyStopper(config())
    assert stopper.update(1, None) is None
    assert stopper.update(2, math.inf) is None
    assert stopper.update(3, 0.5) is not None


def test_decisions_fit_the_journal_event() -> None:
    decision = EarlyStopper(config()).update(1, 0.5)
    assert decision is not None
    event = EarlyStopping.model_validate({"seq": 1, "time": "2026-01-01T00:00:00Z", **decision.fields()})
    assert event.patience_left == 1


def test_an_empty_state_starts_fresh() -> None:
    stopper = EarlyStopper(config())
    stopper.restore({})
    assert stopper.state() == EarlyStopper(config()).state()
