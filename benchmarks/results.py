"""What a benchmark says: a table for people and benchmarks/results/<subject>.json (DESIGN section 6).

Medians of repetitions with their spread; `ratio` is ours / peer, speeds are rates, bytes are bytes. `limit` names the
physical limit that a row is held against, with its figures.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import median

import psutil

RESULTS = Path(__file__).with_name("results")
PACKAGES = ("torch", "transformers", "peft", "accelerate", "safetensors", "numpy")


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeated measurements of one quantity."""

    values: list[float]

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def lowest(self) -> float:
        return min(self.values)

    @property
    def highest(self) -> float:
        return max(self.values)


@dataclass(frozen=True, slots=True)
class Row:
    """One claim. `goal` and `better` say when it is met; a row without goal is told, not judged."""

    claim: str
    ours: float
    peer: float | None
    unit: str
    limit: str
    goal: float | None = None
    better: str = "more"
    """more: ratio (or `ours` without a peer) must reach `goal`; less: it must not exceed it."""
    spread: dict[str, list[float]] = field(default_factory=dict)
    """Every repetition, ours and peer."""
    notes: str = ""

    @property
    def ratio(self) -> float | None:
        return self.ours / self.peer if self.peer else None

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        value = self.ours if self.ratio is None else self.ratio
        return value >= self.goal if self.better == "more" else value <= self.goal


def machine() -> dict[str, object]:
    """What the figures depend on."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return f"{named.get('model name', platform.machine())}, model {named.get('model', '?')}"


def versions(peer: Path | None = None) -> dict[str, object]:
    """Versions of this environment, the commit, and those of the peer's environment."""
    found: dict[str, object] = {name: _version(name) for name in PACKAGES}
    found["commit"] = _commit()
    if peer is not None:
        code = (
            "import importlib.metadata as m, json;"
            "print(json.dumps({n: m.version(n) for n in ('trl', 'torch', 'transformers', 'accelerate', 'peft')}))"
        )
        found["peer"] = json.loads(subprocess.run([peer, "-c", code], check=True, capture_output=True).stdout)
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    here = Path(__file__).parent
    done = subprocess.run(["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or None


def write(
    subject: str, rows: Sequence[Row], *, peer: Path | None = None, extra: dict[str, object] | None = None
) -> Path:
    """Write benchmarks/results/<subject>.json, keeping, with their commit, rows that this run did not measure."""
    path = RESULTS / f"{subject}.json"
    path.parent.mkdir(exist_ok=True)
    kept = [] if not path.exists() else json.loads(path.read_text())["rows"]
    measured = {row.claim for row in rows}
    commit = _commit()
    new = [{**asdict(row), "ratio": row.ratio, "met": row.met, "commit": commit} for row in rows]
    document = {
        "machine": machine(),
        "versions": versions(peer),
        **(extra or {}),
        "rows": [*(row for row in kept if row["claim"] not in measured), *new],
    }
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    return path


def show(rows: Sequence[Row]) -> None:
    """Print the table and under it what each row is held against."""
    print(f"\n{'claim':<24}{'ours':>14}{'peer':>14}  {'unit':<22}{'ratio':>7}{'goal':>9}  met")
    for row in rows:
        sign = "≥" if row.better == "more" else "≤"
        ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
        goal = "" if row.goal is None else f"{sign} {row.goal:g}"
        met = {None: "", True: "yes", False: "NO"}[row.met]
        peer = "" if row.peer is None else number(row.peer)
        print(f"{row.claim:<24}{number(row.ours):>14}{peer:>14}  {row.unit:<22}{ratio:>7}{goal:>9}  {met}")
    for row in rows:
        ranges = "; ".join(
            f"{side} {number(min(v))} to {number(max(v))} (n={len(v)})" for side, v in row.spread.items()
        )
        print(f"\n{row.claim}: {row.limit}" + (f"\n  spread: {ranges}" if ranges else ""))
        if row.notes:
            print(f"  {row.notes}")
    sys.stdout.flush()


def number(value: float) -> str:
    """Example: number(1234567) == "1,234,567"; number(0.12345) == "0.1235"."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
