"""The parts of an RL stage that a TRL config describes: batches, loss, advantage, KL, correction, optimizer."""

from __future__ import annotations

import math
from typing import Any

from app.configs.trl_source import TrlSource

Part = dict[str, Any]
STAND_IN_STEPS = 100
NORMALIZERS = {
    "dapo": "tokens", "cispo": "tokens", "bnpo": "tokens", "sapo": "tokens", "vespo": "tokens", "grpo": "sequences",
    "dr_grpo": "constant", "luspo": "constant",
}  # fmt: skip


# ---------------------------------------------------------------- batches and steps
def batches(trl: TrlSource) -> Part:
    """prompts_per_step, group_size, minibatches and epochs. Raises ValueError for what TRL itself refuses."""
    group, window = trl.whole("num_generations"), trl.whole("gradient_accumulation_steps")
    rows = trl.whole("per_device_train_batch_size") * trl.num_processes
    generation = _steps_per_generation(trl, rows, window)
    if rows * generation % group:
        raise ValueError(f"a generation of {rows * generation} completions holds no whole groups of {group}")
    prompts, minibatches = rows * generation // group, max(1, generation // window)
    if generation < window:
        prompts *= window // generation
    if max(generation, window) % min(generation, window):
        trl.say("steps_per_generation", "an optimizer step of TRL spans parts of generations; here a step never does")
    epochs = trl.whole("num_iterations")
    if generation < window and epochs > 1:
        trl.say("num_iterations", "TRL repeats a generation within one optimizer step; here it is repeated in steps")
    if minibatches > prompts:
        trl.say(
            "steps_per_generation", f"a minibatch needs a prompt, so there are {prompts} of them, not {minibatches}"
        )
        minibatches = prompts
    elif minibatches > 1:
        text = "TRL deals the completions of a generation out to its steps; here each step gets whole prompts"
        trl.say("steps_per_generation" if "steps_per_generation" in trl.given else "generation_batch_size", text)
    return {"prompts_per_step": prompts, "group_size": group, "minibatches": minibatches, "epochs": epochs}


def _steps_per_generation(trl: TrlSource, rows: int, window: int) -> int:
    whole, steps = trl["generation_batch_size"], trl["steps_per_generation"]
    if whole is not None and steps is not None:
        raise ValueError("generation_batch_size and steps_per_generation cannot both be given")
    if whole is None:
        return window if steps is None else trl.whole("steps_per_generation")
    if trl.whole("generation_batch_size") % rows:
        raise ValueError(f"generation_batch_size {whole} is no multiple of the global batch size {rows}")
    return trl.whole("generation_batch_size") // rows


def num_steps(trl: TrlSource, parts: Part) -> int:
    """max_steps, or a stand-in where TRL counts passes over data whose length is not known here."""
    each, asked = parts["minibatches"] * parts["epochs"], trl.whole("max_steps")
    steps: int = math.ceil((asked if asked > 0 else STAND_IN_STEPS) / each) * each
    if asked <= 0:
        rule = f"{trl['num_train_epochs']:g} x rows x {each} / {parts['prompts_per_step']}"
        trl.say(
            "num_train_epochs", f"TRL counts passes over the data, here optimizer steps count: set num_steps to {rule}"
        )
    elif steps != asked:
        trl.say("max_steps", f"a stage ends with a batch of {each} steps, so num_steps is {steps}")
    if asked > 0:
        trl.say_if_given("max_steps decides", "num_train_epochs")
    return steps


# ---------------------------------------------------------------- loss and advantage
def loss(trl: TrlSource) -> Part:
    kind, by_sequence = trl["loss_type"], trl["importance_sampling_level"] == "sequence"
    low, high = trl.number("epsilon"), trl.number("epsilon" if trl["epsilon_high"] is None else "epsilon_high")
    if kind not in NORMALIZERS:
        raise ValueError(f"loss_type {kind} is not one of {', '.join(NORMALIZERS)}")
    if kind == "cispo":
        return _cispo(trl, high, by_sequence=by_sequence)
    _say_of_kind(trl, kind)
    part: Part = {"kind": "gspo" if by_sequence or kind in ("luspo", "vespo") else "clip", "clip_low": low}
    part |= {"clip_high": high, "normalizer": NORMALIZERS[kind]}
    return part | _dual_clip(trl, part["kind"], high)


def _say_of_kind(trl: TrlSource, kind: str) -> None:
    sentences = {
        "bnpo": "TRL takes the mean over the tokens of each micro-batch, so the gradient depends on how rows are cut; "
        "here it is the mean over the tokens of the whole step",
        "sapo": "a soft gate in place of the clip, which has no equal; the clipped loss stands there",
        "luspo": "GSPO with each sequence weighted by its length; normalizer constant is that / max_completion_length",
        "vespo": "a smooth weight on sequences, which has no equal; GSPO stands there",
    }
    if kind in sentences:
        trl.say("loss_type", sentences[kind])


def _cispo(trl: TrlSource, cap: float, *, by_sequence: bool) -> Part:
    trl.say_if_given("CISPO in TRL has no lower bound, nor here (clip_low stays empty)", "epsilon")
    trl.say_if_given("has no effect on CISPO", "delta")
    if by_sequence:
        trl.say("importance_sampling_level", "CISPO's weights belong to tokens here; use gspo for weights of sequences")
    if cap <= 1:
        trl.say(
            "epsilon_high", f"TRL would cut every weight at {cap:g}, also 1 itself; the paper's cap of 5 stands there"
        )
        cap = 5.0
    return {"kind": "cispo", "clip_high": cap - 1, "normalizer": "tokens"}


def _dual_clip(trl: TrlSource, kind: str, high: float) -> Part:
    if trl["delta"] is None:
        return {}
    bound = trl.number("delta")
    if kind == "clip" and bound > 1 and bound >= 1 + high:
        trl.say(
            "delta", "TRL bounds the ratio of the unclipped branch; above 1 + epsilon_high that is loss.dual_clip, set"
        )
        return {"dual_clip": bound}
    where = "at or below 1 + epsilon_high it bounds the loss otherwise" if kind == "clip" else "GSPO has no such bound"
    trl.say("delta", f"TRL bounds the ratio of the unclipped branch; {where}, so it was left out")
    return {}


def advantage(trl: TrlSource) -> Part:
    scale = {True: "group", False: "none"}.get(trl["scale_rewards"], trl["scale_rewards"])
    if trl["multi_objective_aggregation"] != "sum_then_normalize":
        text = "set as normalize: group of each part; by the sample's deviation in TRL, by the population's here"
        trl.say("multi_objective_aggregation", text)
    if scale == "none":
        return {"kind": "dr_grpo"}
    if scale == "batch":
        trl.say("scale_rewards", "TRL divides by the deviation of the whole batch; here it is the group's own")
    else:
        trl.say("scale_rewards", "TRL divides by std + 0.0001, here by std; a group without variance gets 0 in both")
    return {"kind": "grpo"}


def kl(trl: TrlSource) -> Part:
    """TRL loads no reference at beta 0, so nothing is tracked."""
    weight, unbiased = trl.number("beta"), bool(trl["use_bias_correction_kl"])
    if weight > 0 and unbiased and trl["importance_sampling_level"] == "sequence":
        trl.say("use_bias_correction_kl", "TRL weighs it by the sequence's ratio; here each token by its own")
    return {"weight": weight, "estimator": "k3", "place": "loss", "unbiased": unbiased, "track": weight > 0}


def entropy(trl: TrlSource) -> Part:
    share = trl.number("top_entropy_quantile")
    if share <= 0:
        trl.say("top_entropy_quantile", "TRL then trains on the one token of highest entropy; 0.01 stands there")
    return {"bonus": trl.number("entropy_coef"), "top_share": share if share > 0 else 0.01}


def correction(trl: TrlSource) -> Part:
    """Only with vLLM, whose log-probabilities differ from the trainer's."""
    names = [f"vllm_importance_sampling_{name}" for name in ("correction", "mode", "clip_max", "clip_min", "cap")]
    if not trl["use_vllm"]:
        trl.say_if_given("has no effect without use_vllm; set correction if you want one", *names)
        return {"kind": "none"}
    if not trl["vllm_importance_sampling_correction"]:
        return {"kind": "none"}
    level, _, kind = str(trl["vllm_importance_sampling_mode"]).partition("_")
    if (level, kind) not in {(a, b) for a in ("token", "sequence") for b in ("truncate", "mask")}:
        raise ValueError(f"vllm_importance_sampling_mode {level}_{kind} is not known")
    low = trl.number_or("vllm_importance_sampling_clip_min", 0.0)
    cap = "vllm_importance_sampling_cap"
    highest = cap if trl[cap] is not None else "vllm_importance_sampling_clip_max"
    high = trl.number_or(highest, 1e6)
    return {"kind": kind, "level": level, "min_weight": low, "max_weight": high}


# ---------------------------------------------------------------- sampling and optimizer
def sampling(trl: TrlSource) -> Part:
    length = trl["max_completion_length"]
    if length is None:
        trl.say("max_completion_length", "TRL then sets no limit; 512 stands there")
    cuts = {name: trl.number_or(name, neutral) for name, neutral in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))}
    cutting = [name for name, value in cuts.items() if value != (1 if name == "top_p" else 0)]
    if cutting:
        text = "TRL trains on the full distribution; here on that of the kept tokens, so that ratios begin at 1"
        trl.say(cutting[0], text)
    return {"temperature": trl.number("temperature"), **cuts, "max_new_tokens": max_length(trl)}


def max_length(trl: TrlSource) -> int:
    return int(trl.number_or("max_completion_length", 512))


def optimizer(trl: TrlSource, steps: int) -> Part:
    schedule, warmup = str(trl["lr_scheduler_type"]), trl.steps("warmup_steps", steps)
    warmup = warmup or math.ceil(trl.number("warmup_ratio") * steps)
    if str(trl["optim"]) not in ("adamw_torch", "adamw_torch_fused"):
        trl.say("optim", "the optimizer here is AdamW in float32")
    if schedule == "constant" and warmup:
        trl.say_if_given("a constant schedule has no warm-up in TRL", "warmup_steps", "warmup_ratio")
        warmup = 0
    if schedule not in ("constant", "constant_with_warmup", "linear", "cosine"):
        trl.say("lr_scheduler_type", "schedules here are constant, linear and cosine; linear stands there")
        schedule = "linear"
    norm = trl.number("max_grad_norm")
    names = {"learning_rate": "learning_rate", "beta1": "adam_beta1", "beta2": "adam_beta2", "epsilon": "adam_epsilon"}
    part = {ours: trl.number(theirs) for ours, theirs in names.items()}
    return part | {
        "weight_decay": trl.number("weight_decay"), "warmup_steps": warmup,
        "schedule": schedule.partition("_")[0], "max_gradient_norm": norm if norm > 0 else 1e9,
    }  # fmt: skip


def memory(trl: TrlSource) -> Part:
    """As many tokens at once as TRL's rows of full length; the gradient does not depend on it."""
    tokens = trl.whole("per_device_train_batch_size") * max_length(trl)
    return {
        "max_micro_batch_tokens": tokens,
        "gradient_checkpointing": "full" if trl["gradient_checkpointing"] else "none",
    }


def evaluation(trl: TrlSource, steps: int) -> Part:
    match str(trl["eval_strategy"]):
        case "steps":
            every = trl.steps("logging_steps" if trl["eval_steps"] is None else "eval_steps", steps)
        case "no":
            text = "TRL never evaluates; here held-out prompts are answered before the first and after the last step"
            trl.say("eval_strategy", text)
            trl.say_if_given("has no effect without eval_strategy steps", "eval_steps")
            every = steps
        case _:
            trl.say("eval_strategy", "evaluation here counts steps; set evaluation.every_steps")
            every = steps
    return {"every_steps": max(1, every)}


def checkpoint(trl: TrlSource, steps: int) -> Part:
    strategy = str(trl["save_strategy"])
    every = max(1, min(steps, trl.steps("save_steps", steps))) if strategy == "steps" else steps
    if strategy == "no":
        trl.say("save_strategy", "TRL saves nothing; the last step is always kept here")
    elif strategy != "steps":
        trl.say("save_strategy", "checkpoints here count steps; set checkpoint.every_steps")
    limit = trl.number_or("save_total_limit", 0)
    return {"every_steps": every, "keep_last": int(limit) or math.ceil(steps / every)}
