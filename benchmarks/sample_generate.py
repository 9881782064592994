"""A peer of the rollout benchmark: `transformers.generate`, with the scores that log-probabilities are made of.

Its log-probabilities are not computed (that would be more work of its own); ours are. `python -m
benchmarks.sample_generate JOB.json`, spoken to as `standing` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks import sampling_jobs
from benchmarks.standing import Job, Measure, serve


@contextmanager
def start(job: Job) -> Iterator[Measure]:
    whole = sampling_jobs.given(job, {})
    torch.set_num_threads(whole["threads"])
    dtype = getattr(torch, whole["dtype"])
    model: Any = AutoModelForCausalLM.from_pretrained(whole["model"], dtype=dtype).to(whole["device"]).eval()
    # Completions of a fixed length: without an end token nothing watches for one.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def measure(order: Job) -> Job:
        return sampling_jobs.timed(lambda: generate(model, sampling_jobs.given(job, order)), finish(whole["device"]))

    yield measure


def generate(model: Any, job: Job) -> list[int]:
    """Length of every completion."""
    ids = torch.tensor(sampling_jobs.prompts(job), device=job["device"])
    torch.manual_seed(job["number"])
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=job["temperature"],
            top_k=job["top_k"],
            top_p=1.0,
            num_return_sequences=job["group_size"],
            max_new_tokens=job["max_new_tokens"],
            output_scores=True,
            return_dict_in_generate=True,
        )
    count, length = output.sequences.shape
    return [length - ids.shape[1]] * count


def finish(device: str) -> Any:
    """What waits for the device's work."""
    return torch.cuda.synchronize if device == "cuda" else lambda: None


if __name__ == "__main__":
    serve(start)
