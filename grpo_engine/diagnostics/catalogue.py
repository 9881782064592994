"""What every metric of the journal means, and how it is shown. Torch-free.

Names with a part in the middle (reward/part/<name>/mean) are told by `families`. Verdicts live in `verdicts`.
"""

from __future__ import annotations

from grpo_engine.diagnostics.families import MetricInfo, of_family
from grpo_engine.diagnostics.verdicts import Level, Verdict, judge, verdict

__all__ = ["KEY_INDICATORS", "METRICS", "Level", "MetricInfo", "Verdict", "info", "judge", "verdict"]

METRICS: dict[str, MetricInfo] = {
    "reward/mean": MetricInfo("Mean reward", "", "Mean reward of the step's completions.", "reward", "digits", "good"),
    "reward/std": MetricInfo(
        "Reward spread", "", "Standard deviation of the step's rewards.",
        "reward", "digits", "neutral"),
    "reward/min": MetricInfo("Lowest reward", "", "Lowest reward of the step.", "reward", "digits", "good"),
    "reward/max": MetricInfo("Highest reward", "", "Highest reward of the step.", "reward", "digits", "good"),
    "reward/smoothed": MetricInfo(
        "Smoothed reward", "", "0.9 of its last value + 0.1 of the batch's mean reward; advantages use it.",
        "reward", "digits", "good"),
    "reward/part_disagreement": MetricInfo(
        "Parts that disagree", "", "Share of completion pairs that two reward parts order in opposite ways.",
        "reward parts", "percent", "bad"),
    "reward/late": MetricInfo(
        "Judged too late", "completions", "Completions that a reward part did not judge within its time limit.",
        "reward parts", "integer", "bad"),
    "reward/judge_requests": MetricInfo(
        "Judge: requests", "requests", "Requests sent to judges in the step, further tries included.",
        "reward parts", "integer", "neutral"),
    "reward/judge_cached": MetricInfo(
        "Judge: already answered", "completions", "Completions whose verdict was known from an equal one before.",
        "reward parts", "integer", "neutral"),
    "reward/judge_failed": MetricInfo(
        "Judge: no verdict", "completions", "Completions that a judge gave no usable verdict on; they abstained.",
        "reward parts", "integer", "bad"),
    "reward/judge_cost": MetricInfo(
        "Judge: cost", "", "What the step's requests cost, in the unit of the config's prices.",
        "reward parts", "digits", "neutral"),
    "reward/learned_spread": MetricInfo(
        "Learned parts, spread", "", "Mean standard deviation between the learned parts' values of one completion.",
        "reward parts", "digits", "bad"),
    "reward/pool_restarts": MetricInfo(
        "Scoring processes replaced", "processes", "Processes of slow metrics that were late or broke down.",
        "reward parts", "integer", "bad"),
    "reward/sandbox_restarts": MetricInfo(
        "Sandbox slots replaced", "slots", "Servers of the sandbox that had to be started anew.",
        "reward parts", "integer", "bad"),
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
    "groups/too_long": MetricInfo(
        "Prompts left out", "prompts", "Prompts of the batch that leave no room for a completion in the context.",
        "groups", "integer", "bad"),
    "advantage/abs_mean": MetricInfo(
        "Mean |advantage|", "", "Mean absolute advantage of the step's completions.",
        "groups", "digits", "neutral"),
    "loss": MetricInfo(
        "Loss", "", "The loss that was minimised; in GRPO its level says little.",
        "policy", "digits", "neutral"),
    "loss/policy": MetricInfo(
        "Loss, policy", "", "The part of the loss that comes from advantages and ratios.",
        "policy", "digits", "neutral"),
    "loss/kl": MetricInfo(
        "Loss, KL", "", "The part of the loss that holds the policy near its reference: kl.weight x KL.",
        "policy", "digits", "neutral"),
    "loss/entropy": MetricInfo(
        "Loss, entropy", "", "The part of the loss that rewards entropy: minus entropy.bonus x entropy.",
        "policy", "digits", "neutral"),
    "loss/value": MetricInfo(
        "Loss, value", "", "The critic's part of the loss: value.loss_weight x value loss.",
        "policy", "digits", "neutral"),
    "loss/auxiliary": MetricInfo(
        "Loss, auxiliary", "", "Next-token cross entropy on sampled completions x auxiliary.weight.",
        "policy", "digits", "neutral"),
    "policy/entropy": MetricInfo(
        "Entropy", "nats", "Mean entropy of the policy's next-token distribution.",
        "policy", "digits", "neutral"),
    "policy/kl": MetricInfo(
        "KL to the reference", "nats", "Mean estimate of the KL divergence to the stage's start, by kl.estimator (k3).",
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
    "policy/ratio_max": MetricInfo(
        "Largest ratio", "", "Largest probability ratio of new to old policy among the step's tokens.",
        "policy", "digits", "bad"),
    "value/loss": MetricInfo(
        "Value loss", "", "The critic's squared error against the returns, clipped, before its weight.",
        "value", "digits", "bad"),
    "value/explained_variance": MetricInfo(
        "Explained variance", "", "1 - var(returns - values) / var(returns): 1 predicts all, 0 only their mean.",
        "value", "digits", "good"),
    "value/clip_share": MetricInfo(
        "Values clipped", "", "Share of tokens whose value moved further from the old one than the clip allows.",
        "value", "percent", "bad"),
    "value/mean": MetricInfo("Mean value", "", "The critic's mean prediction.", "value", "digits", "neutral"),
    "value/gradient_norm": MetricInfo(
        "Critic's gradient norm", "", "L2 norm of the critic's gradient before clipping.",
        "value", "digits", "neutral"),
    "sampler/weight_mean": MetricInfo(
        "Mean correction weight", "", "Mean importance weight from the sampler's to the trainer's policy; near 1.",
        "sampler", "digits", "neutral"),
    "sampler/masked_share": MetricInfo(
        "Masked by correction", "", "Share of tokens left out because sampler and trainer disagree on them.",
        "sampler", "percent", "bad"),
    "sampler/logprob_gap_k3": MetricInfo(
        "Sampler gap", "nats", "k3 distance between the sampler's and the trainer's log-probabilities.",
        "sampler", "scientific", "bad"),
    "staleness/max": MetricInfo(
        "Staleness", "steps", "Most optimizer steps between sampling and training of a completion.",
        "sampler", "integer", "bad"),
    "rollout/tokens_per_forward": MetricInfo(
        "Tokens a forward", "tokens", "Tokens that a row gained in a forward pass, on average; 1 without drafts.",
        "rollout", "digits", "good"),
    "rollout/draft_gain": MetricInfo(
        "Gain by drafts", "", "Estimated sampling speed with drafts as a multiple of that without.",
        "rollout", "digits", "good"),
    "rollout/accepted_share": MetricInfo(
        "Drafts accepted", "", "Share of drafted tokens that the policy accepted.",
        "rollout", "percent", "good"),
    "rollout/draft_length_mean": MetricInfo(
        "Draft length", "tokens", "Tokens drafted in a step, on average; 0 where none were worth it.",
        "rollout", "digits", "neutral"),
    "rollout/drafted_tokens": MetricInfo(
        "Drafted tokens", "tokens", "Tokens drafted in the batch.",
        "rollout", "integer", "neutral"),
    "rollout/slot_use_share": MetricInfo(
        "Slots in use", "", "Share of the decoder's row slots that held an unfinished completion, over all its steps.",
        "rollout", "percent", "good"),
    "rollout/straggler_rows": MetricInfo(
        "Stragglers", "rows", "Completions that were decoded at the end, in a batch of their own.",
        "rollout", "integer", "neutral"),
    "rollout/cached_prompt_share": MetricInfo(
        "Prompt tokens cached", "", "Share of prompt tokens that vLLM had computed already, for others of their group.",
        "rollout", "percent", "good"),
    "rollout/servers_ready": MetricInfo(
        "Servers", "servers", "vLLM servers that get work, those of all ranks.",
        "rollout", "integer", "good"),
    "rollout/requests_retried": MetricInfo(
        "Requests tried again", "requests", "Completions that went to another server because theirs failed.",
        "rollout", "integer", "bad"),
    "rollout/sync_s": MetricInfo(
        "Weight update", "s", "Time until the sampler had the trainer's weights, without the probe.",
        "rollout", "seconds", "bad"),
    "rollout/probe_gap_nats": MetricInfo(
        "Probe gap", "nats", "Largest difference between sampler and trainer in the probe that follows each update.",
        "rollout", "scientific", "bad"),
    "rollout/weight_updates_repeated": MetricInfo(
        "Updates repeated", "updates", "Weight updates sent a second time because the probe had failed.",
        "rollout", "integer", "bad"),
    "optimizer/gradient_norm": MetricInfo(
        "Gradient norm", "", "L2 norm of the gradient before clipping.",
        "optimizer", "digits", "neutral"),
    "optimizer/learning_rate": MetricInfo(
        "Learning rate", "", "Rate of this step by the schedule.",
        "optimizer", "scientific", "neutral"),
    "optimizer/skipped_steps": MetricInfo(
        "Skipped steps", "steps", "Steps skipped because loss or gradient was not finite.",
        "optimizer", "integer", "bad"),
    "optimizer/rate_scale": MetricInfo(
        "Rate scale", "", "What the schedule's rate is multiplied by; below 1 after a guard rolled training back.",
        "optimizer", "digits", "neutral"),
    "guards/rollbacks": MetricInfo(
        "Rollbacks", "rollbacks", "Times in this stage that a guard restored the last good checkpoint.",
        "optimizer", "integer", "bad"),
    "throughput/train_tokens_per_s": MetricInfo(
        "Training speed", "tokens/s", "Completion tokens trained a second of training time.",
        "speed", "si", "good"),
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
        "memory", "bytes", "bad"),
    "memory/allocated_bytes": MetricInfo(
        "Device memory", "bytes", "Peak of what tensors held on the device in this step.",
        "memory", "bytes", "bad"),
    "memory/reserved_bytes": MetricInfo(
        "Device memory, reserved", "bytes", "Peak of what the allocator held of the device, tensors or not.",
        "memory", "bytes", "bad"),
    "memory/fragmentation_share": MetricInfo(
        "Memory fragmentation", "", "Share of the reserved device memory that no tensor used at the peak.",
        "memory", "percent", "bad"),
    "memory/micro_batch_tokens": MetricInfo(
        "Micro-batch limit", "tokens", "Tokens of one forward and backward pass; halved when memory ran out.",
        "memory", "integer", "neutral"),
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


def info(name: str) -> MetricInfo:
    """The metric's entry; for a name that is in no family either, one made for it."""
    return METRICS.get(name) or of_family(name) or _unknown(name)


def _unknown(name: str) -> MetricInfo:
    return MetricInfo(name, "", "Not in the catalogue.", name.split("/")[0], "digits", "neutral")
