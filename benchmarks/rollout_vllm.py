"""Claims decode_vs_vllm, vllm_overhead, vllm_two_servers and weight_update. All need vLLM's environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.batches import demo_model, smollm2
from benchmarks.peers import vllm_python
from benchmarks.processes import Side, run_job
from benchmarks.results import Row, Spread
from benchmarks.rollout_decode import decode_limit
from benchmarks.rollout_models import endless, parameters
from benchmarks.rollout_setup import Setup, ours, rate_row, rates, raw_vllm
from benchmarks.standing import Job, take_turns

WARM_UP: Job = {"max_new_tokens": 4}
UPDATE_GOAL_S = 0.015
COPY_BYTES_PER_S = 10e9
"""Memory that one thread copies in a second, roughly."""


# ---------------------------------------------------------------- our decoder against vLLM
def decode_vs_vllm(setup: Setup) -> list[Row]:
    """3.4 M, 8 prompts of 32 tokens x 16 x 128; and, told without a goal, SmolLM2-135M, 16 prompts x 64."""
    small = {"max_new_tokens": setup.size(128, 8)}
    large = {
        "num_prompts": setup.size(16, 2), "group_size": 1, "vocabulary": [100, 49_000],
        "max_new_tokens": setup.size(64, 3),
    }  # fmt: skip
    return [
        _against_vllm("decode_vs_vllm", setup, endless("3.4m"), small, goal=1.0, compiled=not setup.small),
        _against_vllm("decode_vs_vllm_135m", setup, smollm2(), large, goal=None, compiled=False),
    ]


def _against_vllm(claim: str, setup: Setup, model: Path, job: Job, *, goal: float | None, compiled: bool) -> Row:
    """Against vLLM's eager mode and, with `compiled`, its compiled graphs, whichever is faster."""
    job = {"model": str(model), "device": setup.device, "ends": False, **job}
    python = vllm_python()
    sides = [ours(job), raw_vllm({**job, "enforce_eager": True}, python, "vLLM, eager")]
    if compiled:
        sides.append(raw_vllm({**job, "enforce_eager": False}, python, "vLLM, compiled"))
    mine, *theirs = take_turns(sides, setup.repetitions, warm_up=WARM_UP)
    medians = [Spread(rates(answers)).median for answers in theirs]
    best = medians.index(max(medians))
    told = ", ".join(f"{side.name} {rate:,.0f}" for side, rate in zip(sides[1:], medians, strict=True))
    return rate_row(
        claim, rates(mine), rates(theirs[best]), decode_limit(model, job), goal=goal,
        notes=f"{told} tokens/s; full distribution at temperature 1, float32, one thread, prompts new to both",
    )  # fmt: skip


# ---------------------------------------------------------------- our backends on vLLM
def vllm_overhead(setup: Setup) -> list[Row]:
    """Our vLLM backend against `LLM.generate` with the same prompts, weights and sampling."""
    python, model = vllm_python(), endless("3.4m")
    job = {"model": str(model), "device": setup.device, "max_new_tokens": setup.size(128, 8)}
    mine, theirs, unseeded = take_turns(
        [
            ours({**job, "rollout": _backend(job, "vllm")}, "our vLLM backend", python),
            raw_vllm({**job, "seeded": True}, python),
            raw_vllm(job, python, "LLM.generate, unseeded"),
        ],
        setup.repetitions,
        warm_up=WARM_UP,
    )
    row = rate_row(
        "vllm_overhead", rates(mine), rates(theirs), "1: vLLM's own time on both sides", goal=0.95,
        notes="both with a seed for every completion and the sampled tokens' log-probabilities; ours also decodes the "
        f"text. Without seeds LLM.generate reaches {Spread(rates(unseeded)).median:,.0f} tokens/s. 3.4 M parameters, "
        "float32, eager, one thread",
    )  # fmt: skip
    return [row]


def vllm_two_servers(setup: Setup) -> list[Row]:
    """Two servers that our pool starts against one, each with one thread."""
    python, model = vllm_python(), endless("3.4m")
    job = {"model": str(model), "device": setup.device, "max_new_tokens": setup.size(128, 8)}
    pools = [
        ours({**job, "rollout": _backend(job, "vllm_server") | {"num_servers": count}}, f"{count} server(s)", python)
        for count in (2, 1)
    ]
    two, one = take_turns(pools, setup.repetitions, warm_up=WARM_UP)
    row = rate_row(
        "vllm_two_servers", rates(two), rates(one),
        "2: a core for each server; requests, answers and HTTP share them", goal=1.6,
        notes=f"8 prompts x 16 x {job['max_new_tokens']}, 3.4 M parameters, float32, one thread a server",
    )  # fmt: skip
    return [row]


def _backend(job: Job, name: str) -> dict[str, Any]:
    return {"backend": name, "max_model_len": 32 + job["max_new_tokens"], "max_rows": 256}


# ---------------------------------------------------------------- weights
def weight_update(setup: Setup) -> list[Row]:
    """Seconds until a sampler in this process has the learner's weights: 0.86 M, and SmolLM2-135M told without goal."""
    rows = [_update_row("weight_update", setup, demo_model(), UPDATE_GOAL_S)]
    if not setup.small:
        rows.append(_update_row("weight_update_135m", setup, smollm2(), None))
    return rows


def _update_row(claim: str, setup: Setup, model: Path, goal: float | None) -> Row:
    """The slower of vLLM in process and our decoder."""
    python = vllm_python()
    found: dict[str, list[float]] = {}
    for name, backend in (("vLLM in process", "vllm"), ("our decoder", "torch")):
        job = {"model": str(model), "device": setup.device, "updates": setup.size(30, 3)}
        rollout = _backend({"max_new_tokens": 32}, backend) if backend == "vllm" else {"backend": backend}
        side = Side(name, [str(python), "-m", "benchmarks.weight_updates"], {**job, "rollout": rollout}, {})
        found[name] = run_job(side, {})["seconds"]
    slower = max(found, key=lambda name: Spread(found[name]).median)
    told = "; ".join(f"{name} {Spread(seconds).median * 1e3:.2f} ms" for name, seconds in found.items())
    size = 4 * parameters(model)
    return Row(
        claim, Spread(found[slower]).median, None, "s an update",
        f"{size / 1e6:,.1f} MB copied once, {size / COPY_BYTES_PER_S * 1e3:.2f} ms at 10 GB/s",
        goal=goal, better="less", spread={"ours": found[slower]},
        notes=f"medians of {len(found[slower])}: {told}. vLLM: until load_weights has returned, its prefix cache "
        "emptied; our decoder reads the learner's own weights, so its time is that until the first token of a prompt "
        "of 8 has come from the new weights, repacking included",
    )  # fmt: skip
