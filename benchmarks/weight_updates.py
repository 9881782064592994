"""How long a sampler takes to have new weights, in a process of its own: `python -m benchmarks.weight_updates JOB`."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import sampling_jobs
from benchmarks.sample_generate import finish
from benchmarks.sample_ours import JOB, make_policy, run_config
from benchmarks.standing import Job
from grpo_engine.config import SamplingConfig
from grpo_engine.model.adapters import merged_weights
from grpo_engine.protocols import Sampler
from grpo_engine.samplers import make_sampler
from grpo_engine.types import SampleRequest

WARM_UPS = 3
PROMPT = list(range(8, 16))


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    Path(job["out"]).write_text(json.dumps({"seconds": run(sampling_jobs.given({**JOB, **job}, {}))}))


def run(job: Job) -> list[float]:
    """Seconds of `updates` updates, each with weights that differ from the ones before."""
    torch.set_num_threads(job["threads"])
    config = run_config(job)
    policy = make_policy(config, job)
    with tempfile.TemporaryDirectory() as folder:
        sampler = make_sampler(config, policy, 0, folder=Path(folder))
        try:
            sampler.load_weights(merged_weights(policy.model), 0)
            found = [update(sampler, policy.model, version, job) for version in range(1, WARM_UPS + job["updates"] + 1)]
        finally:
            sampler.close()
    return found[WARM_UPS:]


def update(sampler: Sampler, model: Any, version: int, job: Job) -> float:
    """Change every weight, as an optimizer step does, and send them."""
    with torch.no_grad():
        weights: list[Tensor] = list(model.parameters())
        torch._foreach_mul_(weights, 1.0 + 1e-4 * (-1) ** version)
    wait = finish(job["device"])
    wait()
    started = time.perf_counter()
    sampler.load_weights(merged_weights(model), version)
    if sampler.shares_weights:
        sampler.sample([SampleRequest(PROMPT, (version,), f"{version}")], SamplingConfig(max_new_tokens=1))
    wait()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
