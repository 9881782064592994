"""What every metric of the journal means, and how it is shown. Torch-free.

Names with a part in the middle (reward/part/<name>/mean) are resolved by `info`. Verdicts live in `verdicts`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from grpo_engine.diagnostics.verdicts import Level, Verdict, judge, verdict

__all__ = ["KEY_INDICATORS", "METRICS", "Level", "MetricInfo", "Verdict", "info", "judge", "verdict"]

Format = Literal["percent", "digits", "si", "integer", "seconds", "bytes", "scientific"]
"""percent: 0.42 -> 42 %; digits: three significant ones; si: 12.3 k; integer; seconds; bytes: GB; scientific: 1e-6."""
Direction = Literal["good", "bad", "neutral"]


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """Example: METRICS["policy/entropy"].unit == "nats"."""

    label: str
    unit: str
    description: str
    group: str
    """Metrics of a group share a row of charts."""
    format: Format
    higher_is: Direction


METRICS: dict[str, MetricInfo] = {
    "reward/mean": MetricInfo("Mean reward", "", "Mean reward of the step's completions.", "reward", "digits", "good"),
    "reward/std": MetricInfo(
        "Reward spread", "", "Standard deviation of the step's rewards.",
        "reward", "digits", "neutral"),
    "reward/min": MetricInfo("Lowest reward", "", "Lowest reward of the step.", "reward", "digits", "good"),
    "reward/max": MetricInfo("Highest reward", "", "Highest reward of the step.", "reward", "digits", "good"),
    "evaluation/accuracy_greedy": MetricInfo(
        "Accuracy, greedy", "", "Share of held-out prompts answered right by greedy decoding.",
        "evaluation", "percent", "good"),
    "evaluation/accuracy_sampled": MetricInfo(
        "Accuracy, sampled", "", "Share of held-out prompts answered right by one sample.",
        "evaluation", "percent", "good"),
    "evaluation/mean_length_tokens": MetricInfo(
        "Length in evaluation", "tokens", "Mean length of the greedy completions.",
        "evaluation", "digits", "neutral"),
    "completion/mean_length_tokens": MetricInfo(
        "Completion length", "tokens", "Mean length of the step's completions.",
        "completion", "digits", "neutral"),
    "completion/max_length_tokens": MetricInfo(
        "Longest completion", "tokens", "Longest completion of the step.",
        "completion", "integer", "neutral"),
    "completion/truncated_share": MetricInfo(
        "Truncated", "", "Share of completions cut by the token limit.",
        "completion", "percent", "bad"),
    "groups/zero_variance_share": MetricInfo(
        "Groups without variance", "", "Share of groups whose rewards are all equal; they carry no gradient.",
        "groups", "percent", "bad"),
    "groups/trained": MetricInfo(
        "Groups trained", "groups", "Groups that the step trained on.",
        "groups", "integer", "good"),
    "advantage/abs_mean": MetricInfo(
        "Mean |advantage|", "", "Mean absolute advantage of the step's completions.",
        "groups", "digits", "neutral"),
    "loss": MetricInfo(
        "Loss", "", "The loss that was minimised; in GRPO its level says little.",
        "policy", "digits", "neutral"),
    "policy/entropy": MetricInfo(
        "Entropy", "nats", "Mean entropy of the policy's next-token distribution.",
        "policy", "digits", "neutral"),
    "policy/kl": MetricInfo(
        "KL to the reference", "nats", "Mean k3 estimate of the KL divergence to the stage's start.",
        "policy", "digits", "neutral"),
    "policy/clip_share": MetricInfo(
        "Clipped", "", "Share of tokens whose probability ratio was clipped.",
        "policy", "percent", "bad"),
    "policy/clip_low_share": MetricInfo(
        "Clipped below", "", "Share of tokens clipped at 1 - clip_low.",
        "policy", "percent", "bad"),
    "policy/clip_high_share": MetricInfo(
        "Clipped above", "", "Share of tokens clipped at 1 + clip_high.",
        "policy", "percent", "bad"),
    "policy/ratio_mean": MetricInfo(
        "Mean ratio", "", "Mean probability ratio of new to old policy; near 1.",
        "policy", "digits", "neutral"),
    "sampler/logprob_gap_k3": MetricInfo(
        "Sampler gap", "nats", "k3 distance between the sampler's and the trainer's log-probabilities.",
        "sampler", "scientific", "bad"),
    "staleness/max": MetricInfo(
        "Staleness", "steps", "Most optimizer steps between sampling and training of a completion.",
        "sampler", "integer", "bad"),
    "optimizer/gradient_norm": MetricInfo(
        "Gradient norm", "", "L2 norm of the gradient before clipping.",
        "optimizer", "digits", "neutral"),
    "optimizer/learning_rate": MetricInfo(
        "Learning rate", "", "Rate of this step by the schedule.",
        "optimizer", "scientific", "neutral"),
    "optimizer/skipped_steps": MetricInfo(
        "Skipped steps", "steps", "Steps skipped because loss or gradient was not finite.",
        "optimizer", "integer", "bad"),
    "throughput/tokens_per_s": MetricInfo(
        "Throughput", "tokens/s", "Completion tokens sampled and trained a second.",
        "speed", "si", "good"),
    "time/rollout_s": MetricInfo("Sampling", "s", "Time spent sampling completions.", "speed", "seconds", "bad"),
    "time/reward_s": MetricInfo("Scoring", "s", "Time spent scoring completions.", "speed", "seconds", "bad"),
    "time/reference_s": MetricInfo(
        "Reference", "s", "Time spent on the reference's forward.",
        "speed", "seconds", "bad"),
    "time/train_s": MetricInfo(
        "Training", "s", "Time spent on forward, backward and update.",
        "speed", "seconds", "bad"),
    "time/step_s": MetricInfo("Whole step", "s", "Time of the whole step.", "speed", "seconds", "bad"),
    "memory/rss_bytes": MetricInfo(
        "Memory", "bytes", "Resident memory of the training process.",
        "speed", "bytes", "bad"),
    "sft/token_accuracy": MetricInfo(
        "Token accuracy", "", "Share of demonstration tokens that are the policy's first choice.",
        "supervised", "percent", "good"),
}  # fmt: skip

KEY_INDICATORS: tuple[str, ...] = (
    "reward/mean",
    "evaluation/accuracy_greedy",
    "groups/zero_variance_share",
    "policy/entropy",
    "policy/kl",
    "policy/clip_share",
    "sampler/logprob_gap_k3",
    "optimizer/gradient_norm",
    "completion/truncated_share",
    "staleness/max",
    "throughput/tokens_per_s",
    "memory/rss_bytes",
)

_PART_MEAN = MetricInfo("", "", "Mean value of this reward part, before its weight.", "reward parts", "digits", "good")
_PART_ABSTAINED = MetricInfo(
    "", "", "Share of completions that this reward part did not judge.", "reward parts", "percent", "bad"
)


def info(name: str) -> MetricInfo:
    """The metric's entry; for reward/part/<part>/mean, …/abstained_share and unknown names, one made for it."""
    if name in METRICS:
        return METRICS[name]
    match name.split("/"):
        case ["reward", "part", part, "mean"]:
            return replace(_PART_MEAN, label=f"Part {part}")
        case ["reward", "part", part, "abstained_share"]:
            return replace(_PART_ABSTAINED, label=f"Part {part}, abstained")
    return MetricInfo(name, "", "Not in the catalogue.", name.split("/")[0], "digits", "neutral")
