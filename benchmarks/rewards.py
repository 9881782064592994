"""The reward module's claims, all absolute: `make bench-rewards` (about five minutes on two quiet cores).

`ARGS="--only sandbox_programs,hung_program"` measures some of them, `--rounds N` repeats each N times.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from benchmarks import results
from benchmarks.results import Row

PARTS = {
    "sandbox_programs": "rewards_sandbox",
    "hung_program": "rewards_sandbox",
    "math_answers": "rewards_answers",
    "cheap_metrics": "rewards_text",
}
"""Claim -> the module of this package that has a function of its name."""


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rewards", description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help="claims, separated by commas")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions of each")
    parsed = parser.parse_args(given)
    parsed.claims = parsed.only.split(",")
    if unknown := sorted(set(parsed.claims) - set(PARTS)):
        parser.error(f"--only {unknown[0]}: no such claim; choose among {', '.join(PARTS)}")
    return parsed


def main(given: Sequence[str] | None = None) -> int:
    parsed = arguments(given)
    rows: list[Row] = []
    for claim in parsed.claims:
        print(f"{claim} ...", flush=True)
        # Imported late, each by itself: one part's libraries must not weigh on another's forks.
        measure: Callable[[int], list[Row]] = getattr(import_module(f"benchmarks.{PARTS[claim]}"), claim)
        rows += measure(parsed.rounds)
    results.show(rows)
    print(f"\nwritten: {results.write('rewards', rows)}")
    return 0 if all(row.met is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
