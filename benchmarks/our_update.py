"""Our side of the training benchmarks, a process of its own: `python -m benchmarks.our_update JOB.json`.

The same job as `trl_update.py`'s, with advantages given. The learner is built as the engine builds it; a step is timed
from `accumulate` to the end of `step` (clipping, optimizer, gradients cleared). The first step's gradient is kept
before clipping when `gradients` names a file.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.trl_update import memory
from grpo_engine.communicator import SingleRank
from grpo_engine.config import AdditionData, FolderModel, LengthReward, OptimizerConfig, RLStage
from grpo_engine.model.loading import Policy, load_policy
from grpo_engine.training.learner import TorchLearner
from grpo_engine.training.objectives import PolicyObjective
from grpo_engine.types import Normalizer, TrainRow, global_denominator

JOB: dict[str, Any] = {
    "model": None,
    "policy_weights": None,
    "rows": None,  # [{prompt_ids, completion_ids, advantage, old_logprobs, ref_logprobs, loss_mask}]
    "parts": None,  # [[row indices]] of each accumulate call; None = one call with all rows
    "denominators": None,  # one a call; None = the engine's own over the whole step
    "stage": {},  # fields of an RLStage: loss, kl, entropy, ...
    "max_completion_length": 1024,
    "max_micro_batch_tokens": 8192,
    "gradient_checkpointing": "none",
    "dtype": "float32",
    "device": "cpu",
    "threads": 1,
    "repetitions": 5,
    "warmups": 1,
    "learning_rate": 1e-6,
    "gradients": None,
    "out": None,
}


def main() -> None:
    job = {**JOB, **json.loads(Path(sys.argv[1]).read_text())}
    torch.set_num_threads(job["threads"])
    Path(job["out"]).write_text(json.dumps(run(job)))


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Times, memory and the loss of `warmups` + `repetitions` steps on the job's rows."""
    stage = rl_stage(job)
    device = torch.device(job["device"])
    policy = load_policy(FolderModel(path=str(job["model"])), seed=0, dtype=job["dtype"], device=device)
    if job["policy_weights"]:
        policy.model.load_state_dict(load_file(job["policy_weights"]), strict=False)
    learner = make_learner(policy, stage, job)
    rows = [train_row(row) for row in job["rows"]]
    calls = accumulate_calls(rows, stage, job)
    memory_at_start = memory()
    seconds, cpu_seconds, losses = [], [], []
    for number in range(job["warmups"] + job["repetitions"]):
        wall, cpu = time.perf_counter(), time.process_time()
        for part, denominator in calls:
            learner.accumulate(part, denominator)
        if number == 0 and job["gradients"]:
            save_file(gradients(policy.model), job["gradients"])
            wall, cpu = time.perf_counter(), time.process_time()  # a warm-up's time is not read
        losses.append(learner.step().stats.get("loss", float("nan")))
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - wall)
        cpu_seconds.append(time.process_time() - cpu)
    return {
        "seconds": seconds[job["warmups"] :],
        "cpu_seconds": cpu_seconds[job["warmups"] :],
        "loss": losses[0],
        "memory_at_start": memory_at_start,
        "memory": memory(),
        "peak_device_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "num_threads": job["threads"],
    }


def rl_stage(job: dict[str, Any]) -> RLStage:
    """A stage around the job's loss; its data and rewards are never read."""
    shape = {
        "data": AdditionData().model_dump(),
        "rewards": [LengthReward(max_tokens=64, buffer_tokens=8).model_dump()],
        "sampling": {"temperature": job.get("temperature", 1.0), "max_new_tokens": job["max_completion_length"]},
        "kl": {"track": False},
        "memory": {
            "max_micro_batch_tokens": job["max_micro_batch_tokens"],
            "gradient_checkpointing": job["gradient_checkpointing"],
        },
    }
    return RLStage.model_validate({**shape, **job["stage"]})


def make_learner(policy: Policy, stage: RLStage, job: dict[str, Any]) -> TorchLearner:
    return TorchLearner(
        policy.model,
        OptimizerConfig(learning_rate=job["learning_rate"]),
        num_steps=1000,
        objective=PolicyObjective.from_stage(stage),
        memory=stage.memory,
        dtype=job["dtype"],
        pad_token_id=int(policy.tokenizer.pad_token_id or 0),
        communicator=SingleRank(),
    )


def train_row(row: dict[str, Any]) -> TrainRow:
    names = ("prompt_ids", "completion_ids", "advantage", "old_logprobs", "ref_logprobs", "loss_mask")
    # The sampler's log-probabilities only feed a statistic here; a run has always some.
    sampled = row.get("old_logprobs") or [-1.0] * len(row["completion_ids"])
    return TrainRow(**{name: row[name] for name in names if name in row}, rollout_logprobs=sampled)


def accumulate_calls(
    rows: Sequence[TrainRow], stage: RLStage, job: dict[str, Any]
) -> list[tuple[list[TrainRow], float]]:
    """The step's accumulate calls with their denominators."""
    parts = job["parts"] or [list(range(len(rows)))]
    normalizer = Normalizer(stage.loss.normalizer, job["max_completion_length"])
    whole = global_denominator(rows, normalizer)
    denominators = job["denominators"] or [whole] * len(parts)
    return [([rows[i] for i in part], value) for part, value in zip(parts, denominators, strict=True)]


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {f"gradient/{name}": gradient.detach().cpu().clone() for name, gradient in found.items()}


if __name__ == "__main__":
    main()
