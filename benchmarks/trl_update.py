"""TRL's side of the training benchmarks; runs in TRL's environment as `python -P trl_update.py JOB.json` and imports
nothing of Cohort.

It builds a GRPOTrainer on a model folder and runs its own `train()` on a fixed batch. The batch goes in through
`rollout_func`, so padding, masks of truncated completions, `num_items_in_batch`, rewards, advantages, the reference's
log-probabilities, shuffling and splitting over the accumulation are TRL's own; generation is not run. A step is timed
from the start of its first `training_step` to `on_step_end`, which follows clipping, the optimizer and zero_grad.

What a job may hold and its defaults: `JOB` below. The result goes to `out` as JSON; with `gradients` named, loss and
gradients of the first step (before clipping) go there as safetensors.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

JOB: dict[str, Any] = {
    "model": None,  # folder; also the reference's weights where beta > 0
    "policy_weights": None,  # safetensors that replace the policy's weights after the reference was made
    "rows": None,  # [{prompt_ids, completion_ids, reward, old_logprobs or null}], group after group
    "group_size": 16,
    "rows_per_micro_batch": 16,
    "temperature": 1.0,
    "max_completion_length": 1024,
    "dtype": "float32",
    "gradient_checkpointing": False,
    "threads": 1,
    "repetitions": 5,
    "warmups": 1,
    "learning_rate": 1e-6,
    "settings": {},  # further GRPOConfig fields: loss_type, beta, epsilon, ...
    "gradients": None,
    "out": None,
}


def main() -> None:
    job = {**JOB, **json.loads(Path(sys.argv[1]).read_text())}
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(job["threads"])
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRL_EXPERIMENTAL_SILENCE="1")
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(job["threads"])
    with tempfile.TemporaryDirectory() as scratch:
        result = run(job, scratch)
    Path(job["out"]).write_text(json.dumps(result))


def run(job: dict[str, Any], scratch: str) -> dict[str, Any]:
    """Train `warmups` + `repetitions` steps on the batch; times, memory and what TRL made of the batch."""
    from safetensors.torch import load_file, save_file

    trainer = make_trainer(job, scratch)
    if job["policy_weights"]:
        trainer.model.load_state_dict(load_file(job["policy_weights"]), strict=False)
    clock = attach_clock(trainer, job)
    memory_at_start = memory()
    trainer.train()
    if job["gradients"]:
        save_file(clock.tensors, job["gradients"])
    return {
        "seconds": clock.seconds[job["warmups"] :],
        "cpu_seconds": clock.cpu_seconds[job["warmups"] :],
        "loss": clock.losses[0],
        "memory_at_start": memory_at_start,
        "memory": memory(),
        "padded_tokens": clock.padded_tokens,
        "num_threads": job["threads"],
    }


def make_trainer(job: dict[str, Any], scratch: str) -> Any:
    """A GRPOTrainer whose rollouts are the job's rows and whose rewards are the rows' rewards."""
    # By name: these packages are in the peer's environment alone.
    trl, datasets = import_module("trl"), import_module("datasets")
    transformers_logging = import_module("transformers.utils.logging")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    rows = job["rows"]
    steps = job["warmups"] + job["repetitions"]
    arguments = trl.GRPOConfig(
        output_dir=scratch,
        use_cpu=not job.get("cuda", False),
        bf16=job["dtype"] == "bfloat16",
        fp16=False,
        per_device_train_batch_size=job["rows_per_micro_batch"],
        gradient_accumulation_steps=len(rows) // job["rows_per_micro_batch"],
        gradient_checkpointing=job["gradient_checkpointing"],
        num_generations=job["group_size"],
        max_completion_length=job["max_completion_length"],
        temperature=job["temperature"],
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant",
        max_steps=steps,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        shuffle_dataset=False,
        max_grad_norm=0.0,
        **job["settings"],
    )
    prompts = datasets.Dataset.from_dict({"prompt": [f"{index}" for index in range(len(rows) // job["group_size"])]})

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        names = ("prompt_ids", "completion_ids")
        return {name: [row[name] for row in rows] for name in names} | {"logprobs": None}

    def reward(**_: Any) -> list[float]:
        return [row["reward"] for row in rows]

    return trl.GRPOTrainer(
        model=job["model"], reward_funcs=reward, args=arguments, train_dataset=prompts, rollout_func=rollout
    )


def make_clock(gradients: bool) -> Any:
    """A callback that times each step, and with `gradients` keeps those of the first."""
    from transformers import TrainerCallback  # after main() has set the environment

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.cpu_seconds: list[float] = []
            self.losses: list[float] = []
            self.tensors: dict[str, Any] = {}
            self.padded_tokens = 0
            self.started: tuple[float, float] | None = None
            self.loss: Any = 0.0

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if not self.losses and gradients:
                found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
                self.tensors.update({f"gradient/{name}": gradient for name, gradient in found.items()})
            args.max_grad_norm = 1.0  # the first step's gradient was looked at before clipping

        def on_step_end(self, *_: Any, **__: Any) -> None:
            assert self.started is not None
            wall, cpu = self.started
            self.seconds.append(time.perf_counter() - wall)
            self.cpu_seconds.append(time.process_time() - cpu)
            self.losses.append(float(self.loss))
            self.started, self.loss = None, 0.0

    return Clock()


def attach_clock(trainer: Any, job: dict[str, Any]) -> Any:
    """Make the batch once, put the job's old log-probabilities in, time each step and keep the first gradient."""
    import torch

    rows: list[dict[str, Any]] = job["rows"]
    make = trainer._generate_and_score_completions
    clock = make_clock(bool(job["gradients"]))

    def made_once(inputs: Any) -> dict[str, Any]:
        batch: dict[str, Any] = make(inputs)
        batch["row_index"] = torch.arange(len(rows))
        if rows[0].get("old_logprobs") is not None:
            old = torch.zeros_like(batch["completion_ids"], dtype=torch.float32)
            for index, values in enumerate(row["old_logprobs"] for row in rows):
                old[index, : len(values)] = torch.tensor(values)
            batch["old_per_token_logps"] = old
        clock.padded_tokens = batch["prompt_ids"].numel() + batch["completion_ids"].numel()
        clock.tensors["advantages"] = batch["advantages"].clone()
        return batch

    def prepare(generation_batch: Any) -> Any:
        number = trainer._step % trainer.args.steps_per_generation
        if trainer._buffered_inputs is None:
            original(generation_batch)
            made: Any = vars(trainer)["_buffered_inputs"]
            clock.tensors["order"] = torch.cat([part["row_index"] for part in made])
        if clock.started is None:
            clock.started = time.perf_counter(), time.process_time()
        part: dict[str, Any] = trainer._buffered_inputs[number]
        return part

    def training_step(*args: Any, **kwargs: Any) -> Any:
        loss = step(*args, **kwargs)
        clock.loss = clock.loss + loss
        return loss

    original, step = trainer._prepare_inputs, trainer.training_step
    trainer._generate_and_score_completions = made_once
    trainer._prepare_inputs = prepare
    trainer.training_step = training_step
    trainer.add_callback(clock)
    return clock


def memory() -> dict[str, int]:
    """Resident bytes now and at their highest."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {"resident": int(lines["VmRSS"].split()[0]) * 1024, "peak": int(lines["VmHWM"].split()[0]) * 1024}


if __name__ == "__main__":
    main()
