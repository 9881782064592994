"""A peer of the rollout benchmark: `LLM.generate` as vLLM's users call it, with the sampled tokens' log-probabilities.

Runs in vLLM's environment and imports nothing of Cohort's engine: `python -m benchmarks.sample_vllm JOB.json`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from benchmarks import sampling_jobs
from benchmarks.standing import Job, Measure, serve

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else it takes every core, whatever OMP_NUM_THREADS says
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""In one process, the fastest start and the least overhead (research/vllm-cpu.md, section 2)."""


@contextmanager
def start(job: Job) -> Iterator[Measure]:
    os.environ.update(ENVIRONMENT)
    import torch

    whole = sampling_jobs.given(job, {})
    torch.set_num_threads(whole["threads"])
    vllm: Any = import_module("vllm")  # by name: it is in the peer's environment alone
    llm = vllm.LLM(
        model=whole["model"],
        dtype=whole["dtype"],
        enforce_eager=whole.get("enforce_eager", True),
        max_model_len=whole["prompt_tokens"] + whole["max_new_tokens"],
        max_num_seqs=256,
        seed=0,
        logprobs_mode="processed_logprobs",
        **({"gpu_memory_utilization": 0.3} if whole["device"] == "cuda" else {}),
    )

    def measure(order: Job) -> Job:
        return sampling_jobs.timed(lambda: generate(vllm, llm, sampling_jobs.given(job, order)))

    yield measure


def generate(vllm: Any, llm: Any, job: Job) -> list[int]:
    """Length of every completion; their log-probabilities are read, as a trainer would."""
    sampling = vllm.SamplingParams(
        n=job["group_size"],
        temperature=job["temperature"],
        top_k=job["top_k"],
        max_tokens=job["max_new_tokens"],
        logprobs=0,
        ignore_eos=not job["ends"],
        detokenize=False,
        # A seed of its own for every completion costs vLLM time; Cohort always gives one.
        seed=job["number"] if job.get("seeded") else None,
    )
    inputs = [{"prompt_token_ids": ids} for ids in sampling_jobs.prompts(job)]
    lengths = []
    for request in llm.generate(inputs, sampling, use_tqdm=False):
        for output in request.outputs:
            logprobs = [found[token].logprob for token, found in zip(output.token_ids, output.logprobs, strict=True)]
            lengths.append(len(logprobs))
    return lengths


if __name__ == "__main__":
    serve(start)
