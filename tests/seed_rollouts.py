"""Completions and metrics of the seeded runs: three-digit additions, answered better as training goes on."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from grpo_engine.config import RLStage, RunConfig
from grpo_engine.types import Completion, Group, Prompt, RewardPart, Rollout

NAN_STEP = 5
"""Step of the RL stage whose KL is not a number."""
VOCABULARY = "0123456789+=<>/thinkcary "


def make_groups(step: int, stage: RLStage, salt: int = 0) -> list[Group]:
    """`prompts_per_step` groups; prompts come again every ten steps."""
    return [_group(step, index, stage, salt) for index in range(stage.prompts_per_step)]


def _group(step: int, index: int, stage: RLStage, salt: int) -> Group:
    position = (step % 10) * stage.prompts_per_step + index
    left, right = 100 + 37 * position % 900, 100 + 91 * position % 900
    text = f"{left}+{right}="
    prompt = Prompt(f"addition/{text[:-1]}", position, text, _ids(text), {"answer": str(left + right)})
    seeds = [step * 7 + index * 3 + number + salt for number in range(stage.group_size)]
    drafts = [_rollout(left + right, step, seed, stage) for seed in seeds]
    rewards = [draft.reward for draft in drafts if draft.reward is not None]
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    flat = std < 1e-6
    rollouts = [
        Rollout(
            d.completion,
            d.parts,
            d.reward,
            0.0 if flat or d.reward is None else (d.reward - mean) / std,
            d.ref_logprobs,
            behaviours=d.behaviours,
        )
        for d in drafts
    ]
    return Group(f"{step}-{index}", prompt, rollouts, "zero_variance" if flat else None)


def _rollout(answer: int, step: int, seed: int, stage: RLStage) -> Rollout:
    thinks = seed % 10 < 3 + step // 3
    right = thinks or seed % 4 == 0
    said = str(answer if right else answer + 10)
    text = f"<think>carry {seed % 2}</think>{said}" if thinks else said
    cut = seed % 11 == 0
    ids = _ids(text)
    noise = [((seed * 31 + place * 17) % 97) / 97 for place in range(len(ids))]
    completion = Completion(
        token_ids=ids, text=text, finish_reason="length" if cut else "stop", token_texts=list(text),
        logprobs=[-value for value in noise], full_logprobs=[-value for value in noise], policy_version=step,
    )  # fmt: skip
    parts = list(_parts(text, said, thinks, right, cut, stage))
    reward = sum(part.weight * part.value for part in parts if part.value is not None)
    shown = {"reflection": seed % 3 if thinks else 0, "backtracking": int(seed % 7 == 0)}
    return Rollout(completion, parts, reward, ref_logprobs=[-value * 1.01 for value in noise], behaviours=shown)


def _parts(text: str, said: str, thinks: bool, right: bool, cut: bool, stage: RLStage) -> Iterator[RewardPart]:
    start = len(text) - len(said)
    values = {"accuracy": float(right), "format": float(thinks), "length": None if cut else 0.0}
    reasons = {
        "accuracy": f"'{said}' {'equals' if right else 'differs from'} the gold answer",
        "format": "tags once and in order" if thinks else "no <think>",
        "length": "abstains on truncated text" if cut else "short enough",
    }
    for reward in stage.rewards:
        span = (start, len(text)) if reward.kind == "accuracy" else None
        version = f"{reward.kind}@3f9a12c4"
        value = values[reward.kind]
        yield RewardPart(reward.kind, value, reward.weight, reasons[reward.kind], span, version, counted=value)


def _ids(text: str) -> list[int]:
    return [VOCABULARY.find(character) + 3 for character in text]


def stage_config(run_config: RunConfig) -> RLStage:
    stage = run_config.stages[1]
    assert isinstance(stage, RLStage)
    return stage


def rl_values(step: int, rewards: list[float], zero_variance: float) -> dict[str, float]:
    mean = sum(rewards) / len(rewards)
    return {
        "reward/mean": mean,
        "reward/std": math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards)),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "reward/part/accuracy/mean": max(0.0, mean - 0.05),
        "reward/part/format/mean": min(1.0, 0.4 + step / 40),
        "reward/part/length/mean": -0.02 * (step % 3),
        "completion/mean_length_tokens": 10.0 + 0.8 * step,
        "completion/max_length_tokens": 20.0 + step,
        "completion/truncated_share": 0.05,
        "groups/zero_variance_share": zero_variance,
        "loss": 0.02 * math.cos(step),
        "policy/entropy": 1.2 * math.exp(-step / 30),
        "policy/kl": math.nan if step == NAN_STEP else 0.001 * step,
        "policy/clip_share": 0.01 + 0.001 * (step % 5),
        "sampler/logprob_gap_k3": 1e-7,
    }


def rollout_values(step: int, run_config: RunConfig) -> dict[str, float]:
    """What a sampler tells of a step: drafts where the config has them, a probe where vLLM samples."""
    values = {"rollout/tokens_per_forward": 1.0, "rollout/sync_s": 0.004 + 1e-4 * (step % 3)}
    rollout = run_config.rollout
    if rollout.backend != "torch":
        return values | {"rollout/probe_gap_nats": 3e-6, "rollout/weight_updates_repeated": 0.0}
    values |= {"rollout/slot_use_share": 0.9, "rollout/straggler_rows": float(step % 4)}
    if rollout.drafts.kind == "none":
        return values
    grown = step / (step + 10)
    accepted = {f"rollout/accepted_share_{depth}": 0.9 * grown / depth**0.5 for depth in range(1, 6)}
    lengths = {0: 0.4 * (1 - grown), 2: 0.3, 3: 0.2 + 0.2 * grown, 4: 0.1, 5: 0.2 * grown}
    chosen = {f"rollout/draft_length_share_{length}": share for length, share in lengths.items()}
    drafted = {
        "rollout/tokens_per_forward": 1 + 1.6 * grown, "rollout/drafted_tokens": 9000.0, "rollout/draft_gain": 1.1,
        "rollout/accepted_share": 0.8 * grown, "rollout/draft_length_mean": 2.4 + grown,
    }  # fmt: skip
    return values | accepted | chosen | drafted


def mtp_values(step: int, run_config: RunConfig) -> dict[str, float]:
    """What is told of each MTP head."""
    values: dict[str, float] = {}
    for depth in range(1, run_config.mtp.depth + 1):
        values[f"mtp/loss_{depth}"] = 0.4 * depth + 2 * math.exp(-step / 8)
        values[f"mtp/accuracy_{depth}"] = (1 - math.exp(-step / 8)) * (1 - 0.15 * depth)
    return values


def shared_values(step: int) -> dict[str, float]:
    return {
        "optimizer/gradient_norm": 0.5 + 0.1 * math.sin(step),
        "optimizer/learning_rate": 1e-4,
        "throughput/tokens_per_s": 2400.0 + 10 * step,
        "time/step_s": 0.9,
        "memory/rss_bytes": 6.0e8,
    }
