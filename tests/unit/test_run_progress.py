"""Progress columns and the sparkline of the runs table."""

from __future__ import annotations

from datetime import UTC, datetime

from app.runs.progress import MAX_SPARKLINE_POINTS, add_to_sparkline, progress
from grpo_engine.events import Started, Trained

CONFIG = {"stages": [{"kind": "sft", "num_steps": 10}, {"kind": "rl", "num_steps": 40}]}
NOW = datetime.now(UTC)


def test_a_short_stage_shows_every_reward() -> None:
    rewards: list[float] = []
    for step in range(1, 6):
        rewards = add_to_sparkline(rewards, step, 5, step / 10)

    assert rewards == [0.1, 0.2, 0.3, 0.4, 0.5]


def test_a_long_stage_shows_the_last_reward_of_each_span() -> None:
    rewards: list[float] = []
    for step in range(1, 601):
        rewards = add_to_sparkline(rewards, step, 600, float(step))

    assert len(rewards) == MAX_SPARKLINE_POINTS
    assert rewards[:2] == [10.0, 20.0]
    assert rewards[-1] == 600.0


def test_going_back_to_a_checkpoint_drops_what_lies_after_it() -> None:
    assert add_to_sparkline([0.1, 0.2, 0.3], 2, 40, 0.5) == [0.1, 0.5]


def test_a_span_without_a_reward_repeats_the_one_before() -> None:
    assert add_to_sparkline([0.1], 4, 40, 0.5) == [0.1, 0.1, 0.1, 0.5]
    assert add_to_sparkline([], 3, 40, 0.5) == [0.5, 0.5, 0.5]


def test_a_run_that_starts_again_is_shown_where_it_starts() -> None:
    started = Started(seq=1, time=NOW, config_hash="0", stage_index=1, step=7)

    assert progress(CONFIG, [], [started]) == {
        "stage": "1-rl", "step": 7, "steps_done": 17, "total_steps": 50, "stage_steps": 40,
    }  # fmt: skip


def test_a_trained_step_counts_over_all_stages() -> None:
    trained = Trained(seq=1, time=NOW, stage="1-rl", step=8, started_boot_s=1, ended_boot_s=2)

    changes = progress(CONFIG, [], [trained])
    assert (changes["step"], changes["steps_done"], changes["last_step_at"]) == (8, 18, NOW)
