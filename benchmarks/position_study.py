"""The gradient by position in long completions, with and without the auxiliary next-token loss.

SmolLM2-135M samples two groups of four completions of 1,024 tokens (its end tokens forbidden); half of each group is
rewarded. Shown: the L2 norm of the parameters' gradient that flows through the tokens of each bucket, as it is and
divided by the square root of the bucket's tokens (buckets differ in size).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch

from benchmarks import results
from benchmarks.batches import smollm2
from benchmarks.our_update import rl_stage
from grpo_engine.config import FolderModel, SamplingConfig
from grpo_engine.model.loading import Policy, load_policy
from grpo_engine.model.logprobs import LogprobForward
from grpo_engine.rollout.torch_sampler import TorchSampler
from grpo_engine.training.objectives import PolicyObjective
from grpo_engine.training.positions import parameter_gradient_norms
from grpo_engine.types import SampleRequest, TrainRow, global_denominator

LENGTH = 1024
EDGES = (0, 128, 256, 512, 768)
GROUPS, GROUP_SIZE = 2, 4
WEIGHTS = (0.0, 0.1)
"""auxiliary.weight: without, and with."""
PROMPTS = ("Explain step by step how rain forms.", "Tell a long story about a lighthouse keeper.")


def main() -> int:
    policy = load_policy(FolderModel(path=str(smollm2())), seed=0, dtype="bfloat16", device=torch.device("cpu"))
    rows = sampled_rows(policy)
    norms = {weight: bucket_norms(policy, rows, weight) for weight in WEIGHTS}
    table = [row(bucket, norms) for bucket in norms[WEIGHTS[0]]]
    show(table)
    path = results.RESULTS / "positions-study.json"
    path.parent.mkdir(exist_ok=True)
    document = {"machine": results.machine(), "versions": results.versions(), "rows": table}
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"\nwritten: {path}")
    return 0


def sampled_rows(policy: Policy) -> list[TrainRow]:
    sampler = TorchSampler(policy.model, policy.tokenizer, frozenset(), policy.max_context_tokens, dtype="bfloat16")
    requests = [
        SampleRequest(policy.tokenizer(PROMPTS[group])["input_ids"], (0, group, index), str(group))
        for group in range(GROUPS)
        for index in range(GROUP_SIZE)
    ]
    completions = sampler.sample(requests, SamplingConfig(temperature=1.0, max_new_tokens=LENGTH))
    return [
        TrainRow(
            request.prompt_ids,
            completion.token_ids,
            advantage=1.0 if index % 2 else -1.0,
            rollout_logprobs=completion.logprobs,
        )
        for index, (request, completion) in enumerate(zip(requests, completions, strict=True))
    ]


def bucket_norms(policy: Policy, rows: Sequence[TrainRow], weight: float) -> dict[str, float]:
    job = {"max_completion_length": LENGTH, "max_micro_batch_tokens": 2048, "gradient_checkpointing": "none"}
    stage = rl_stage({**job, "stage": {"auxiliary": {"weight": weight}}})
    return parameter_gradient_norms(
        LogprobForward(policy.model, dtype="bfloat16"), PolicyObjective.from_stage(stage), rows,
        global_denominator(rows), max_tokens=2048, edges=EDGES,
    )  # fmt: skip


def row(bucket: str, norms: dict[float, dict[str, float]]) -> dict[str, Any]:
    low, _, high = bucket.partition("-")
    tokens = GROUPS * GROUP_SIZE * (min(LENGTH, LENGTH if high == "inf" else int(float(high))) - int(low))
    without, with_it = (norms[weight][bucket] for weight in WEIGHTS)
    return {
        "bucket": bucket, "tokens": tokens, "without": without, "with": with_it,
        "without_a_token": without / sqrt(tokens), "with_a_token": with_it / sqrt(tokens),
    }  # fmt: skip


def show(table: Sequence[dict[str, Any]]) -> None:
    print(f"\n{'positions':<14}{'tokens':>8}{'without':>12}{'with':>12}{'without/√n':>13}{'with/√n':>12}")
    for line in table:
        values = (line["without"], line["with"], line["without_a_token"], line["with_a_token"])
        print(f"{line['bucket']:<14}{line['tokens']:>8}" + "".join(f"{value:>12.3g}" for value in values))
