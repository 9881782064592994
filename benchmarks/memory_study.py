"""Steps to 90 % greedy accuracy over seeds: GRPO and PPO at three lambdas (`make bench-memory ARGS=--study`)."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks import results
from benchmarks.engine_runs import Fields, Run, changed, cold_start, demo_config, over_seeds, run_arm
from benchmarks.peers import bench_home

TARGET, STEPS, EVERY = 0.9, 80, 2
VALUE_RATE = 3e-4
LAMBDAS = (0.95, 0.5, 1.0)
"""0.95 as in the papers; 0.5 and 1.0 are the wrong ones."""


def arms() -> dict[str, Fields]:
    """Advantage of each arm; everything else is the demo's."""
    found: dict[str, Fields] = {"grpo": {"kind": "grpo"}}
    for value in LAMBDAS:
        critic = {"learning_rate": VALUE_RATE}
        found[f"ppo lambda {value}"] = {"kind": "gae", "gae_lambda": value, "value": critic}
    return found


def main(num_seeds: int) -> int:
    by_seed = over_seeds(study, num_seeds)
    steps = {name: [seed[name][0] for seed in by_seed] for name in arms()}
    seconds = {name: [seed[name][1] for seed in by_seed] for name in arms()}
    rows = [summary(name, steps[name], seconds[name]) for name in steps]
    show(rows)
    path = results.RESULTS / "memory-study.json"
    document = {"machine": results.machine(), "versions": results.versions(), "target": TARGET, "rows": rows}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"\nwritten: {path}")
    return 0


def study(seed: int) -> dict[str, tuple[int | None, float]]:
    """Steps to the target and seconds a step of every arm of one seed; each arm ends where it is reached."""
    checkpoint = cold_start(seed)
    found = {}
    for name, advantage in arms().items():
        folder = bench_home() / "runs" / f"memory-study-{seed}" / name.replace(" ", "-")
        done = run_arm(arm(advantage, seed), folder, checkpoint, until=lambda run: steps_to_target(run) is not None)
        times = [value for _, value in done.series("time/step_s") if value]
        found[name] = steps_to_target(done), median(times or [0.0])
        print(f"  seed {seed}, {name}: {found[name][0] or f'not within {STEPS}'} steps", flush=True)
    return found


def arm(advantage: Fields, seed: int) -> Fields:
    return changed(
        demo_config(),
        seed=seed,
        self_test="off",
        stages__1__advantage=advantage,
        stages__1__num_steps=STEPS,
        stages__1__evaluation={"every_steps": EVERY, "num_prompts": 128},
        stages__1__early_stopping={"mode": "off"},
        stages__1__checkpoint={"every_steps": 1000},
    )


def steps_to_target(done: Run) -> int | None:
    """First evaluated step with TARGET greedy; None when it never came, or the run failed before."""
    return next((step for step, accuracy in done.evaluations() if step and accuracy >= TARGET), None)


def summary(name: str, steps: Sequence[int | None], seconds: Sequence[float]) -> dict[str, Any]:
    """Median and its 90 % bootstrap interval; a run that never came counts as STEPS (so a median may be a bound)."""
    counted = [STEPS if value is None else value for value in steps]
    low, high = interval(counted)
    return {
        "arm": name, "steps": list(steps), "reached": sum(value is not None for value in steps),
        "median_steps": median(counted), "low": low, "high": high, "step_s": median(seconds),
    }  # fmt: skip


def interval(values: Sequence[float], *, share: float = 0.9, draws: int = 2000) -> tuple[float, float]:
    """Bootstrap interval of the median. With five seeds it is coarse, and says so by its width."""
    rng = random.Random(0)
    medians = sorted(median(rng.choices(values, k=len(values))) for _ in range(draws))
    cut = int(draws * (1 - share) / 2)
    return medians[cut], medians[-1 - cut]


def show(rows: Sequence[dict[str, Any]]) -> None:
    print(f"\n{'arm':<20}{'reached':>9}{'median steps':>14}{'90 % interval':>18}{'s a step':>10}")
    for row in rows:
        reached = f"{row['reached']}/{len(row['steps'])}"
        span = f"{row['low']:g} to {row['high']:g}"
        print(f"{row['arm']:<20}{reached:>9}{row['median_steps']:>14g}{span:>18}{row['step_s']:>10.2f}")
    print("The report claims that GRPO converges 3.2 times faster than PPO.")
