"""Claims whole_step and whole_step_bf16: whole GRPO steps (rollout, rewards, update) against TRL 1.16.0.

The baseline of research/deepspeed-trl.md, section B: two-digit addition with <think>, a 0.86 M Llama, 8 prompts x 16,
at most 32 new tokens, from one cold start."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.engine_runs import Fields, changed, cold_start, run, scratch
from benchmarks.peers import trl_python
from benchmarks.processes import Side, run_job
from benchmarks.results import Row, Spread
from benchmarks.rollout_setup import Setup, rate_row
from benchmarks.standing import Job

STEPS, SKIPPED = 14, 2
"""Steps of a run, and those at its start in which libraries settle."""
PROMPTS, GROUP, NEW_TOKENS, RATE = 8, 16, 32, 1e-4


def whole_step(setup: Setup) -> list[Row]:
    return [_compare("whole_step", setup, "float32", goal=1.35)]


def whole_step_bf16(setup: Setup) -> list[Row]:
    return [_compare("whole_step_bf16", setup, "bfloat16", goal=1.6)]


def _compare(claim: str, setup: Setup, dtype: str, goal: float) -> Row:
    """Ours and TRL's runs in turns, one thread each; then once with two threads each, told without a goal."""
    checkpoint = cold_start(0, config=config("float32", setup))
    theirs = trl(checkpoint, dtype, setup)
    found: dict[str, list[Job]] = {"ours": [], "TRL": []}
    for _ in range(setup.repetitions):
        found["ours"].append(our_steps(checkpoint, dtype, setup, threads=1))
        found["TRL"].append(counted(run_job(theirs, {"threads": 1})))
        print(f"  ours {found['ours'][-1]['rate']:,.0f}, TRL {found['TRL'][-1]['rate']:,.0f} tokens/s", flush=True)
    two = [our_steps(checkpoint, dtype, setup, threads=2), counted(run_job(theirs, {"threads": 2}))]
    words = "; ".join(f"{name} {_words(results)}" for name, results in found.items())
    return rate_row(
        claim, *([result["rate"] for result in results] for results in found.values()),
        "the update is matrix products on both sides; what a rollout can save is its own share of the step",
        goal=goal, unit="completion tokens/s",
        notes=f"medians of steps {SKIPPED + 1} to {STEPS} of each run, {dtype}, one thread; {words}. With two threads "
        f"each, one run: {two[0]['rate']:,.0f} against {two[1]['rate']:,.0f}, {two[0]['rate'] / two[1]['rate']:.2f}. "
        "TRL without gradient checkpointing, its faster setting; ours also writes every rollout to disk",
    )  # fmt: skip


def _words(results: list[Job]) -> str:
    names = ("step_s", "length", "reward")
    step_s, length, reward = (Spread([result[name] for result in results]).median for name in names)
    return f"{step_s:.3f} s a step, mean length {length:.1f}, mean reward {reward:.2f}"


# ---------------------------------------------------------------- ours
def config(dtype: str, setup: Setup) -> Fields:
    """The baseline's recipe as a run of the engine: 150 steps of cold start, then GRPO without a reference."""
    return {
        "name": "whole step", "self_test": "off", "dtype": dtype,
        "model": {
            "source": "tiny_llama", "hidden_size": 128, "num_layers": 4, "num_heads": 4, "intermediate_size": 384,
        },
        "stages": [
            {
                "kind": "sft", "data": {"source": "addition", "num_digits": 2, "think_share": 1.0},
                "num_steps": setup.size(150, 3), "rows_per_step": 128,
                "optimizer": {
                    "learning_rate": 3e-3, "warmup_steps": 20, "schedule": "cosine", "final_rate_share": 0.1,
                },
                "checkpoint": {"every_steps": 1000},
            },
            {
                "kind": "rl", "data": {"source": "addition", "num_digits": 2},
                "rewards": [{"kind": "accuracy", "compare": "number"}, {"kind": "format", "weight": 0.1}],
                "num_steps": setup.size(STEPS, SKIPPED + 1), "prompts_per_step": PROMPTS, "group_size": GROUP,
                "sampling": {"max_new_tokens": NEW_TOKENS}, "loss": {"kind": "clip", "clip_high": 0.28},
                "kl": {"track": False}, "optimizer": {"learning_rate": RATE, "beta2": 0.99},
                "evaluation": {"every_steps": 1000, "num_prompts": 1}, "early_stopping": {"mode": "off"},
                "checkpoint": {"every_steps": 1000},
            },
        ],
    }  # fmt: skip


def our_steps(checkpoint: Path, dtype: str, setup: Setup, *, threads: int) -> Job:
    """A run's counted steps, by its journal. Raises RuntimeError with the engine's last words when it fails."""
    with scratch() as folder:
        fields = changed(config(dtype, setup), num_threads=threads, needs__device=setup.device)
        done = run(fields, Path(folder) / "run", fork=checkpoint, threads=threads)
        names = ("throughput/tokens_per_s", "time/step_s", "completion/mean_length_tokens", "reward/mean")
        series = [[value or 0.0 for step, value in done.series(name) if step > SKIPPED] for name in names]
        if done.status or not series[0]:
            raise RuntimeError(f"the run ended with {done.status}: {done.last_words()}")
    rates, seconds, lengths, rewards = series
    return {
        "rate": Spread(rates).median, "step_s": Spread(seconds).median, "length": fmean(lengths),
        "reward": fmean(rewards),
    }  # fmt: skip


# ---------------------------------------------------------------- TRL
def trl(checkpoint: Path, dtype: str, setup: Setup) -> Side:
    """TRL on the same weights and problems."""
    script = str(Path(__file__).with_name("trl_step.py"))
    steps = setup.size(STEPS, SKIPPED + 1)
    job = {
        "model": str(checkpoint), "dtype": dtype, "steps": steps, "prompts": problems(PROMPTS * steps),
        "prompts_per_step": PROMPTS, "group_size": GROUP, "max_completion_length": NEW_TOKENS, "learning_rate": RATE,
        "cuda": setup.device == "cuda",
    }  # fmt: skip
    # -P: the script's folder holds names such as `memory`, which no library may import by accident.
    return Side("TRL", [str(trl_python()), "-P", script], job, {})


def problems(count: int) -> list[dict[str, str]]:
    """The prompts that our run takes, with their answers."""
    from grpo_engine.config import AdditionData
    from grpo_engine.data.addition import Addition
    from grpo_engine.model.tokenizer import character_tokenizer

    source = Addition(AdditionData(num_digits=2), character_tokenizer(), seed=0)
    return [{"prompt": prompt.text, "answer": str(prompt.columns["answer"])} for prompt in source.take(0, count)]


def counted(result: dict[str, Any]) -> Job:
    """TRL's counted steps, in the same terms."""
    seconds, tokens = result["seconds"][SKIPPED:], result["tokens"][SKIPPED:]
    rates = [count / spent for count, spent in zip(tokens, seconds, strict=True)]
    return {
        "rate": Spread(rates).median, "step_s": Spread(seconds).median,
        "length": fmean(tokens) / (PROMPTS * GROUP), "reward": fmean(result["rewards"][SKIPPED:]),
    }  # fmt: skip
