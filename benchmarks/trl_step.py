"""TRL's whole GRPO steps; runs in TRL's environment as `python -P trl_step.py JOB.json` and imports nothing of Cohort.

GRPOTrainer as its users run it: `transformers.generate`, a reward function, its own loss and AdamW. A step is timed
from `on_step_begin` to `on_step_end`, rollout included. The result goes to `out`: seconds, completion tokens and mean
reward of every step.
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
    "model": None,
    "prompts": None,  # [{prompt, answer}]
    "prompts_per_step": 8,
    "group_size": 16,
    "max_completion_length": 32,
    "dtype": "float32",
    "learning_rate": 1e-4,
    "threads": 1,
    "steps": 14,
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
        Path(job["out"]).write_text(json.dumps(run(job, scratch)))


def run(job: dict[str, Any], scratch: str) -> dict[str, Any]:
    trl, datasets = import_module("trl"), import_module("datasets")
    logging = import_module("transformers.utils.logging")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rows = job["prompts_per_step"] * job["group_size"]
    arguments = trl.GRPOConfig(
        output_dir=scratch,
        use_cpu=not job.get("cuda", False),
        bf16=job["dtype"] == "bfloat16",
        gradient_checkpointing=False,  # its faster setting
        per_device_train_batch_size=rows,
        num_generations=job["group_size"],
        max_completion_length=job["max_completion_length"],
        temperature=1.0,
        top_k=0,
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta2=0.99,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="dapo",
        epsilon_high=0.28,
        max_steps=job["steps"],
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        shuffle_dataset=False,
        seed=0,
    )
    tokenizer = import_module("transformers").AutoTokenizer.from_pretrained(job["model"])
    clock = make_clock()
    tokens: list[int] = []

    def reward(completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        tokens.append(sum(len(ids) for ids in completion_ids))
        # TRL's own texts lack the special tokens, <think> among them.
        texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=False)
        return [judge(text, gold) for text, gold in zip(texts, answer, strict=True)]

    trainer = trl.GRPOTrainer(
        model=job["model"],
        processing_class=tokenizer,
        reward_funcs=reward,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(job["prompts"]),
        callbacks=[clock],
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    return {"seconds": clock.seconds, "tokens": tokens, "rewards": rewards}


def judge(text: str, answer: str) -> float:
    """1 for the right answer after </think>, and a tenth for the format, as the demo's rewards."""
    head, mark, tail = text.partition("</think>")
    well_formed = bool(mark) and head.startswith("<think>") and "</think>" not in tail
    said = tail if mark else text
    return float(said.replace("<eos>", "").strip() == answer) + 0.1 * well_formed


def make_clock() -> Any:
    """A callback that times each step."""
    from transformers import TrainerCallback  # after main() has set the environment

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.started = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(time.perf_counter() - self.started)

    return Clock()


if __name__ == "__main__":
    main()
