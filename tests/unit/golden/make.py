"""Makes the golden values beside it: `python -m tests.unit.golden.make`.

50 decimal digits, formulas as the papers write them, no code shared with the engine or the oracles. Run it only when a
convention is changed on purpose."""

from __future__ import annotations

import json
from decimal import Decimal, getcontext
from pathlib import Path
from typing import Any

getcontext().prec = 50
HERE = Path(__file__).parent
D = Decimal
RAGGED = [[1, 0, 0, 1], [1, 0], [0.25, 0.5, 0.5, 2.0, -1.0], [1] + [0] * 15, [0, 3, None, 1], [0.1, 0.2, 0.3, 0.7, 0.7]]


def advantages(form: str, rewards: list[float | None]) -> list[float]:
    known = [D(r) for r in rewards if r is not None]
    n = D(len(known))
    mean = sum(known) / n
    squares = sum((r - mean) ** 2 for r in known)
    values = {
        "grpo": [(r - mean) / (squares / (n - 1)).sqrt() for r in known],
        "seed_paper": [(r - mean) / ((squares / n).sqrt() + D("1e-8")) for r in known],
        "dr_grpo": [r - mean for r in known],
        "rloo": [r - (sum(known) - r) / (n - 1) for r in known],
        "rank": [D(sum((r > s) - (r < s) for s in known)) / (n - 1) for r in known],
    }[form]
    found = iter(values)
    return [0.0 if r is None else float(next(found)) for r in rewards]


def surrogate(ratio: D, advantage: D, low: D, high: D, dual: D | None) -> D:
    clipped = max(min(ratio, 1 + high), 1 - low)
    loss = -min(ratio * advantage, clipped * advantage)
    return min(loss, dual * abs(advantage)) if dual is not None and advantage < 0 else loss


def losses(policy: list[D], old: list[D], advantage: list[D]) -> dict[str, list[float]]:
    ratios = [(p - o).exp() for p, o in zip(policy, old, strict=True)]
    sequence = (sum(p - o for p, o in zip(policy, old, strict=True)) / len(policy)).exp()
    low, high = D("0.2"), D("0.28")
    return {
        "clip": [float(surrogate(r, a, low, high, None)) for r, a in zip(ratios, advantage, strict=True)],
        "dual_clip": [float(surrogate(r, a, low, high, D(3))) for r, a in zip(ratios, advantage, strict=True)],
        "gspo": [float(surrogate(sequence, a, D("3e-4"), D("4e-4"), None)) for a in advantage],
        "cispo": [float(-min(r, D("1.28")) * a * p) for r, a, p in zip(ratios, advantage, policy, strict=True)],
    }


def kl(policy: list[D], reference: list[D]) -> dict[str, list[float]]:
    x = [r - p for p, r in zip(policy, reference, strict=True)]
    return {
        "k1": [float(-v) for v in x],
        "k2": [float(v * v / 2) for v in x],
        "k3": [float(v.exp() - v - 1) for v in x],
    }


def gae(rewards: list[D], values: list[D], gamma: D, lam: D) -> dict[str, Any]:
    following = [*values[1:], D(0)]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    found = [sum((gamma * lam) ** (s - t) * deltas[s] for s in range(t, len(deltas))) for t in range(len(deltas))]
    mean = sum(found) / len(found)
    std = (sum((a - mean) ** 2 for a in found) / (len(found) - 1)).sqrt()
    return {
        "advantages": [float(a) for a in found],
        "returns": [float(a + v) for a, v in zip(found, values, strict=True)],
        "whitened": [float((a - mean) / std) for a in found],
    }


def numbers(*values: float) -> list[D]:
    return [D(value) for value in values]


def write(name: str, content: dict[str, Any]) -> None:
    (HERE / f"{name}.json").write_text(json.dumps({"made_by": "tests/unit/golden/make.py"} | content, indent=1) + "\n")


def main() -> None:
    forms = ("grpo", "seed_paper", "dr_grpo", "rloo", "rank")
    cases = [{"form": f, "rewards": r, "advantages": advantages(f, list(r))} for f in forms for r in RAGGED]
    write("advantages", {"cases": cases})
    policy, old = numbers(-1, -0.5, -2, -0.125, -3, -1.5), numbers(-1.5, -0.25, -2, -0.5, -5, -1.25)
    advantage, reference = numbers(1, -1, 0.5, -2, -0.75, 2), numbers(-1.25, -0.5, -1, -0.375, -4, -1.5)
    flat = {name: [float(v) for v in values] for name, values in locals().items() if name in ("policy", "old")}
    flat |= {"advantage": [float(v) for v in advantage], "reference": [float(v) for v in reference]}
    write("losses", flat | losses(policy, old, advantage) | kl(policy, reference))
    rewards, values = numbers(0, -0.125, 0, 1), numbers(0.25, 0.5, 0.375, 0.75)
    found = {f"{g} {lam}": gae(rewards, values, D(g), D(lam)) for g, lam in (("1", "0.95"), ("0.9", "0.5"), ("1", "1"))}
    write("gae", {"rewards": [float(r) for r in rewards], "values": [float(v) for v in values], "cases": found})


if __name__ == "__main__":
    main()
