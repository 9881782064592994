"""Our side of the rollout benchmark: the sampler that a run's config describes, made as the engine makes it.

`python -m benchmarks.sample_ours JOB.json`, spoken to as `standing` says; with a vLLM backend it runs in vLLM's
environment. Every measurement of the torch decoder begins with a weight update, as every step of a run does, so that
what it repacks or caches of the weights is paid for.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import sampling_jobs
from benchmarks.sample_generate import finish
from benchmarks.standing import Job, Measure, serve
from grpo_engine.config import AdditionData, LengthReward, RunConfig, SamplingConfig
from grpo_engine.model.adapters import merged_weights
from grpo_engine.model.loading import Policy
from grpo_engine.protocols import Sampler
from grpo_engine.resume import load_policy_for
from grpo_engine.samplers import make_lengths, make_sampler
from grpo_engine.types import Completion, SampleRequest, StageProgress

JOB: dict[str, Any] = {
    "rollout": {"backend": "torch"},  # RunConfig.rollout
    "mtp": {},  # RunConfig.mtp; where the model folder is a checkpoint with heads, they are read
}
"""Our own fields beside `sampling_jobs.JOB`."""


@contextmanager
def start(job: Job) -> Iterator[Measure]:
    whole = sampling_jobs.given({**JOB, **job}, {})
    torch.set_num_threads(whole["threads"])
    config = run_config(whole)
    policy = make_policy(config, whole)
    with tempfile.TemporaryDirectory() as folder:
        lengths = make_lengths(config, StageProgress(0))
        sampler = make_sampler(config, policy, 0, lengths=lengths, folder=Path(folder))
        try:
            if not sampler.shares_weights:
                sampler.load_weights(merged_weights(policy.model), 0)
            yield lambda order: sample(sampler, sampling_jobs.given(whole, order))
        finally:
            sampler.close()


def run_config(job: Job) -> RunConfig:
    """A run around the job's rollout section; its data and rewards are never read."""
    stage = {
        "kind": "rl",
        "data": AdditionData().model_dump(),
        "rewards": [LengthReward(max_tokens=64, buffer_tokens=8).model_dump()],
        "sampling": {"max_new_tokens": job["max_new_tokens"]},
    }
    return RunConfig.model_validate({
        "name": "rollout benchmark", "num_threads": job["threads"], "dtype": job["dtype"],
        "model": {"source": "folder", "path": str(job["model"])}, "rollout": job["rollout"], "mtp": job["mtp"],
        "stages": [stage], "needs": {"device": job["device"]},
    })  # fmt: skip


def make_policy(config: RunConfig, job: Job) -> Policy:
    """The folder's policy, with its heads where `mtp` asks for them, and without an end where the job wants none."""
    policy = load_policy_for(config, None, torch.device(job["device"]))
    return policy if job["ends"] else replace(policy, end_token_ids=frozenset())


def sample(sampler: Sampler, job: Job) -> Job:
    """One measurement, with what the sampler tells of it."""
    requests = requests_of(job)
    limits = {name: job[name] for name in ("temperature", "top_k", "min_p", "max_new_tokens")}
    sampling = SamplingConfig.model_validate(limits)
    completions: list[Completion] = []

    def work() -> list[int]:
        if sampler.shares_weights:
            sampler.load_weights(iter(()), job["number"])
        completions.extend(sampler.sample(requests, sampling))
        return [len(completion.token_ids) for completion in completions]

    sampler.take_metrics()
    answer = sampling_jobs.timed(work, finish(job["device"]))
    answer["metrics"] = sampler.take_metrics()
    answer["finish_reasons"] = [completion.finish_reason for completion in completions]
    if job["ids"]:
        answer["ids"] = [completion.token_ids for completion in completions]
    return answer


def requests_of(job: Job) -> list[SampleRequest]:
    """Group after group, each with its prompt; group g of measurement n is `n-g`."""
    drawn, size = sampling_jobs.prompts(job), job["group_size"]
    return [
        SampleRequest(drawn[index // size], tuple(stream), f"{job['number']}-{index // size}")
        for index, stream in enumerate(sampling_jobs.streams(job))
    ]


if __name__ == "__main__":
    serve(start)
