"""The training module's claims against TRL 1.16.0 and against itself: `make bench-training` (about 12 minutes on two
quiet cores, the peer's environment and the cold start included; they are made once).

`ARGS="--only update_skewed,packing"` measures some of them, `--rounds N` repeats each comparison N times.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from benchmarks import peers, results
from benchmarks.results import Row

CLAIMS = ("update_skewed", "update_135m", "update_135m_memory", "packing", "vocab_memory", "two_ranks")


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--only", default=",".join(CLAIMS), help="claims, separated by commas")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each side")
    parsed = parser.parse_args(given)
    parsed.claims = parsed.only.split(",")
    if unknown := sorted(set(parsed.claims) - set(CLAIMS)):
        parser.error(f"--only {unknown[0]}: no such claim; choose among {', '.join(CLAIMS)}")
    return parsed


def main(given: Sequence[str] | None = None) -> int:
    parsed = arguments(given)
    # Imported late: arguments are checked before torch is loaded.
    from benchmarks import ranks, tokens, update

    parts: list[tuple[tuple[str, ...], Callable[[int], list[Row]]]] = [
        (("packing",), lambda rounds: tokens.packing()),
        (("vocab_memory",), tokens.vocab_memory),
        (("update_skewed",), update.update_skewed),
        (("update_135m", "update_135m_memory"), update.update_135m),
        (("two_ranks",), ranks.two_ranks),
    ]
    rows: list[Row] = []
    needs_peer = any(claim.startswith("update") for claim in parsed.claims)
    peer = peers.trl_python() if needs_peer else None
    for names, measure in parts:
        if set(names) & set(parsed.claims):
            print(f"{' and '.join(names)} ...", flush=True)
            rows += [row for row in measure(parsed.rounds) if row.claim in parsed.claims]
    results.show(rows)
    print(f"\nwritten: {results.write('training', rows, peer=peer)}")
    return 0 if all(row.met is not False for row in rows) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (peers.PeerMissing, RuntimeError) as error:
        sys.exit(f"error: {error}")
