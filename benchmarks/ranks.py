"""Claim two_ranks: whole GRPO steps (rollout, rewards, reference, update) of the demo in bfloat16 from one cold start,
two one-thread ranks against one process with one or two threads, whichever is faster."""

from __future__ import annotations

from pathlib import Path

from benchmarks.engine_runs import Fields, changed, cold_start, demo_config, run, scratch
from benchmarks.results import Row, Spread

STEPS = 14
SKIPPED = 2
"""First steps, in which libraries and memory settle."""


def two_ranks(rounds: int) -> list[Row]:
    checkpoint = cold_start(0)
    one = max((1, 2), key=lambda threads: Spread(speeds(checkpoint, num_ranks=1, threads=threads)).median)
    rates: dict[str, list[float]] = {"ours": [], "peer": []}
    for _ in range(rounds):
        rates["ours"].append(Spread(speeds(checkpoint, num_ranks=2, threads=1)).median)
        rates["peer"].append(Spread(speeds(checkpoint, num_ranks=1, threads=one)).median)
    row = Row(
        "two_ranks",
        Spread(rates["ours"]).median,
        Spread(rates["peer"]).median,
        "sampled tokens/s",
        "two cores: twice the speed of one thread, less the exchange of 3.4 MB of gradients a step and the wait for "
        "the slower rank",
        goal=1.3,
        spread=rates,
        notes=f"median of steps {SKIPPED + 1} to {STEPS} of each run; one process is at its best with {one} thread(s)",
    )
    return [row]


def speeds(checkpoint: Path, *, num_ranks: int, threads: int) -> list[float]:
    """Completion tokens a second of each counted step, by the journal. Raises RuntimeError when the run fails."""
    with scratch() as folder:
        done = run(config(num_ranks, threads), Path(folder) / "run", fork=checkpoint, threads=threads)
        found = [value for step, value in done.series("throughput/tokens_per_s") if step > SKIPPED and value]
        if done.status or not found:
            raise RuntimeError(f"the run with {num_ranks} ranks ended with {done.status}: {done.last_words()}")
    print(f"  {num_ranks} rank(s), {threads} thread(s): {Spread(found).median:,.0f} tokens/s", flush=True)
    return found


def config(num_ranks: int, threads: int) -> Fields:
    return changed(
        demo_config(),
        dtype="bfloat16",
        self_test="off",
        num_threads=threads,
        needs__num_ranks=num_ranks,
        stages__1__num_steps=STEPS,
        stages__1__evaluation={"every_steps": 1000, "num_prompts": 1},
        stages__1__early_stopping={"mode": "off"},
        stages__1__checkpoint={"every_steps": 1000},
    )
