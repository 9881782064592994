"""How training survives rates that are too high: `make bench-stability` (one seed, 6 minutes); `ARGS=--study` runs ten
(about 40 minutes).

From each seed's cold start: the demo's RL stage as it is, and with learning rates 3e-4 and 1e-3 without warm-up, guards
off and with rollback. A run passes when its last greedy evaluation is at least 90 %. Of every failed run: the findings
that name a cause, and whether every checkpoint it left verifies. Runs have one thread, two at a time.

`--positions` measures the gradient by position in completions of 1,024 tokens, with and without the auxiliary loss.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.engine_runs import Fields, Run, changed, cold_start, demo_config, over_seeds, run_arm
from benchmarks.peers import bench_home
from grpo_engine.errors import EngineError
from grpo_engine.manifest import verify

PASSED = 0.9
CLAIMED_WITH, CLAIMED_WITHOUT = 0.92, 0.68
"""The report's shares with and without guards."""
DEMO_STEPS, STEPS = 60, 40
RATES = (3e-4, 1e-3)


@dataclass(frozen=True, slots=True)
class Outcome:
    arm: str
    seed: int
    last_accuracy: float | None
    best_accuracy: float | None
    end: str
    """finished, early_stopped, or the reason of the failure."""
    findings: list[str] = field(default_factory=list)
    """`step: detector`, in order."""
    checkpoints: int = 0
    damaged: list[str] = field(default_factory=list)
    """Checkpoints that do not verify."""
    rollbacks: int = 0

    @property
    def passed(self) -> bool:
        return self.last_accuracy is not None and self.last_accuracy >= PASSED


def arms() -> dict[str, Fields]:
    """Fields of each arm over the demo's RL stage."""
    found: dict[str, Fields] = {"demo": {}}
    for rate in RATES:
        for action in ("off", "rollback"):
            found[f"rate {rate:g}, guards {action}"] = {
                "stages__1__num_steps": STEPS,
                "stages__1__optimizer__learning_rate": rate,
                "stages__1__optimizer__warmup_steps": 0,
                "stages__1__guards": {"action": action},
                "stages__1__early_stopping": {"mode": "off"},
            }
    return found


def arm_config(fields: Fields, seed: int) -> Fields:
    return changed(
        demo_config(), seed=seed, self_test="off", stages__1__checkpoint={"every_steps": 5, "keep_last": 20}, **fields
    )


def judge(arm: str, seed: int, done: Run) -> Outcome:
    """Reads the journal and verifies what the run left."""
    accuracies = [value for _, value in done.evaluations()]
    findings = [event for event in done.events("finding") if not event.get("resolved")]
    failed = [event["reason"] for event in done.events("failed")]
    finished = [event["reason"] for event in done.events("finished")]
    folders = sorted(path.parent for path in done.folder.glob("checkpoints/*/manifest.json"))
    return Outcome(
        arm,
        seed,
        last_accuracy=accuracies[-1] if accuracies else None,
        best_accuracy=max(accuracies, default=None),
        end=[*failed, *finished, f"status {done.status}"][0],
        findings=[f"{event['step']}: {event['detector']}" for event in findings],
        checkpoints=len(folders),
        damaged=[folder.name for folder in folders if not verifies(folder)],
        rollbacks=sum("Rolled back" in event["remedy"] for event in findings),
    )


def verifies(folder: Path) -> bool:
    try:
        verify(folder)
    except EngineError:
        return False
    return True


def study(seed: int) -> list[Outcome]:
    """Every arm of one seed, from the same cold start."""
    checkpoint = cold_start(seed)
    outcomes = []
    for number, (name, fields) in enumerate(arms().items()):
        folder = bench_home() / "runs" / f"stability-{seed}" / f"arm-{number}"
        told = judge(name, seed, run_arm(arm_config(fields, seed), folder, checkpoint))
        print(f"  seed {seed}, {name}: {told.last_accuracy} greedy, {told.end}, {told.findings[:3]}", flush=True)
        outcomes.append(told)
    return outcomes


def summary(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """One row an arm."""
    rows = []
    for name in dict.fromkeys(outcome.arm for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.arm == name]
        failed = [outcome for outcome in own if not outcome.passed]
        rows.append({
            "arm": name,
            "runs": len(own),
            "passed": sum(outcome.passed for outcome in own),
            "share": sum(outcome.passed for outcome in own) / len(own),
            "ever_reached": sum((outcome.best_accuracy or 0) >= PASSED for outcome in own),
            "failed_with_finding": sum(bool(outcome.findings) for outcome in failed),
            "failed_with_damaged_checkpoint": sum(bool(outcome.damaged) for outcome in failed),
            "failed_without_checkpoint": sum(outcome.checkpoints == 0 for outcome in failed),
            "rollbacks": sum(outcome.rollbacks for outcome in own),
        })  # fmt: skip
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    print(f"\n{'arm':<32}{'passed':>8}{'ever':>6}{'failed, named cause':>21}{'damaged':>9}{'rollbacks':>11}")
    for row in rows:
        failed = row["runs"] - row["passed"]
        named = f"{row['failed_with_finding']}/{failed}"
        print(
            f"{row['arm']:<32}{row['passed']:>5}/{row['runs']:<2}{row['ever_reached']:>6}{named:>21}"
            f"{row['failed_with_damaged_checkpoint']:>9}{row['rollbacks']:>11}"
        )
    print(f"The report claims {CLAIMED_WITH:.0%} with guards against {CLAIMED_WITHOUT:.0%} without.")


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stability", description=__doc__)
    parser.add_argument("--study", action="store_true", help="ten seeds instead of one")
    parser.add_argument("--seeds", type=int, help="number of seeds; overrides the above")
    parser.add_argument("--positions", action="store_true", help="the gradient by position instead")
    parsed = parser.parse_args(given)
    if parsed.positions:
        from benchmarks import position_study

        return position_study.main()
    by_seed = over_seeds(study, parsed.seeds or (10 if parsed.study else 1))
    outcomes = [outcome for name in arms() for seed in by_seed for outcome in seed if outcome.arm == name]
    rows = summary(outcomes)
    show(rows)
    path = results.RESULTS / ("stability-study.json" if parsed.study else "stability.json")
    path.parent.mkdir(exist_ok=True)
    document = {
        "machine": results.machine(), "versions": results.versions(), "rows": rows,
        "outcomes": [asdict(outcome) | {"passed": outcome.passed} for outcome in outcomes],
    }  # fmt: skip
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"\nwritten: {path}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (RuntimeError, OSError) as error:
        sys.exit(f"error: {error}")
