"""PPO against GRPO, measured: `make bench-memory` (about 12 minutes); `ARGS=--study` compares steps to 90 % (40).

Bytes by part at 256 and 2,048 completion tokens, each in a process of its own: same weights, same tokens, float32,
no KL term but the reference that measures it. Activations are what autograd holds for the backward pass at its
highest; resident memory is the kernel's high-water mark. A step is the reference's and (PPO) the critic's scoring and
the update; sampling is the same for both and left out.

The study: the demo's RL stage from five cold starts, GRPO and PPO with GAE at lambda 0.95 and at two wrong ones, 0.5
(leans on a critic that knows little yet) and 1.0 (whole returns: the critic is a baseline only).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import results
from benchmarks.batches import tiny_llama
from benchmarks.processes import in_process
from benchmarks.results import Row, number

ALGORITHMS = ("grpo", "ppo_copied", "ppo_shared")
LENGTHS = (256, 2048)
ROWS, PROMPT = 8, 40
CLAIMED_SAVING, CLAIMED_SPEED = 0.62, 3.2
"""The report's: memory saved beyond 2,048 tokens, and convergence."""


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--study", action="store_true", help="steps to 90 %% greedy over seeds instead of bytes")
    parser.add_argument("--seeds", type=int, default=5, help="cold starts of the study")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each measurement")
    parsed = parser.parse_args(given)
    if parsed.study:
        from benchmarks import memory_study

        return memory_study.main(parsed.seeds)
    found = {(a, n): measure(a, n, parsed.rounds) for n in LENGTHS for a in ALGORITHMS}
    for length in LENGTHS:
        show_parts(length, {algorithm: found[algorithm, length] for algorithm in ALGORITHMS})
    rows = [row for length in LENGTHS for row in claim_rows(length, found)]
    results.show(rows)
    prediction = predictions()
    show_predictions(prediction)
    parts = {f"{algorithm} at {length}": value for (algorithm, length), value in found.items()}
    print(f"\nwritten: {results.write('memory', rows, extra={'parts': parts, 'predictions': prediction})}")
    return 0


def measure(algorithm: str, length: int, rounds: int) -> dict[str, Any]:
    """The process with the median step time; its bytes are the same in every one but for `resident`."""
    model = tiny_llama("memory-h256x6", hidden_size=256, num_layers=6, num_heads=4, intermediate_size=768,
                       max_context_tokens=2304)  # fmt: skip
    arguments = {"algorithm": algorithm, "length": length, "model": str(model)}
    found = [in_process("benchmarks.memory_parts:parts", arguments, threads=2) for _ in range(rounds)]
    middle: dict[str, Any] = sorted(found, key=lambda result: float(result["step_s"]))[len(found) // 2]
    return middle | {"step_s_all": [result["step_s"] for result in found]}


def claim_rows(length: int, found: dict[tuple[str, int], dict[str, Any]]) -> list[Row]:
    grpo, ppo = found["grpo", length], found["ppo_copied", length]
    saving = 1 - grpo["allocated"] / ppo["allocated"]
    limit = (
        "a critic as large as the policy doubles weights, gradients and moments; the reference stays, and activations "
        "too, since policy and critic run one after the other: with w bytes of weights and a of activations GRPO needs "
        "(5w + a) / (9w + a) of PPO, so it saves less than half"
    )
    memory = Row(
        f"memory_{length}", grpo["allocated"], ppo["allocated"], "bytes allocated at peak", limit,
        notes=f"GRPO needs {saving:.0%} less than PPO with a copied critic; the report claims {CLAIMED_SAVING:.0%} "
        f"beyond 2,048 tokens. Resident: {number(grpo['resident'] / 1e6)} MB against "
        f"{number(ppo['resident'] / 1e6)} MB, libraries included",
    )  # fmt: skip
    seconds = {"ours": [1 / s for s in grpo["step_s_all"]], "peer": [1 / s for s in ppo["step_s_all"]]}
    speed = Row(
        f"step_{length}", 1 / grpo["step_s"], 1 / ppo["step_s"], "steps/s",
        "forward passes (a backward is two): 3 and the reference's 1 against 6, 1 and the critic's 1: twice the work",
        spread=seconds, notes="GRPO against PPO with a copied critic; sampling left out",
    )  # fmt: skip
    return [memory, speed]


def show_parts(length: int, columns: dict[str, dict[str, Any]]) -> None:
    names = ("weights", "gradients", "optimizer", "activations", "value model", "reference", "allocated", "resident")
    print(f"\n{length:,} completion tokens, {ROWS} rows, MB{'':<10}" + "".join(f"{name:>14}" for name in columns))
    for name in names:
        print(f"  {name:<34}" + "".join(f"{column[name] / 1e6:>14,.1f}" for column in columns.values()))
    print(f"  {'seconds a step':<34}" + "".join(f"{column['step_s']:>14.2f}" for column in columns.values()))


# ---------------------------------------------------------------- arithmetic
def predictions() -> list[dict[str, Any]]:
    """Bytes for 7 B and 70 B at 2,048 tokens, by arithmetic.

    Assumed: AdamW in mixed precision, 18 bytes a trained parameter (bf16 copy 2, float32 master 4, gradient 4, moments
    8); frozen models bf16; critic and reward model as large as the policy; 8 rows of 2,048 tokens in a micro-batch;
    full gradient checkpointing: 2 h bytes a token and layer, and one layer's 34 h (arXiv:2205.05198) at a time; policy
    and critic run one after the other, as here, so their activations count once."""
    found = []
    for name, parameters, width, layers in (("7 B", 6.74e9, 4096, 32), ("70 B", 69e9, 8192, 80)):
        tokens = 8 * 2048
        activations = tokens * width * (2 * layers + 34)
        trained, frozen = 18 * parameters, 2 * parameters
        grpo = trained + frozen + activations
        ppo = 2 * trained + frozen + activations
        found.append({
            "model": name, "grpo": grpo, "ppo": ppo, "ppo_with_reward_model": ppo + frozen,
            "activations": activations, "saving": 1 - grpo / ppo,
            "saving_with_reward_model": 1 - grpo / (ppo + frozen),
        })  # fmt: skip
    return found


def show_predictions(found: list[dict[str, Any]]) -> None:
    print(f"\n{(predictions.__doc__ or '').strip()}\n")
    for row in found:
        print(
            f"  {row['model']:>5}: GRPO {row['grpo'] / 1e9:,.0f} GB, PPO {row['ppo'] / 1e9:,.0f} GB (saves "
            f"{row['saving']:.0%}), PPO with a reward model too {row['ppo_with_reward_model'] / 1e9:,.0f} GB "
            f"(saves {row['saving_with_reward_model']:.0%}); the report claims {CLAIMED_SAVING:.0%}"
        )


def make_rows(length: int) -> list[dict[str, Any]]:
    """ROWS rows of exactly `length` completion tokens, two prompts, whose rewards differ in each group."""
    rng = random.Random(0)
    rows = []
    for index in range(ROWS):
        prompt = random.Random(index // 4).choices(range(6, 56), k=PROMPT)
        rows.append({"prompt_ids": prompt, "completion_ids": rng.choices(range(6, 56), k=length), "win": index % 2})
    return rows


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (RuntimeError, json.JSONDecodeError, OSError) as error:
        sys.exit(f"error: {error}")
