"""A TRL GRPO config becomes a run config, with a line for each field that has no equal. Torch-free.

Reads what GRPOConfig holds (YAML or JSON) and the mixed files of `trl grpo --config`. Absent fields mean TRL's
defaults, not ours. Tables: trl_fields; the parts of the stage: trl_stage.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from app.configs import trl_rollout, trl_stage
from app.configs.trl_source import TrlSource
from grpo_engine.config_errors import load_config
from grpo_engine.config_words import show
from grpo_engine.errors import InvalidConfig, Problem

REWARDS: dict[str, dict[str, Any]] = {
    "accuracy_reward": {"kind": "accuracy", "extract": "boxed"},
    "reasoning_accuracy_reward": {"kind": "accuracy", "extract": "after_think"},
    "think_format_reward": {"kind": "format"},
    "get_soft_overlong_punishment": {"kind": "length", "max_tokens": 1280, "buffer_tokens": 256},
}
"""Functions that `trl grpo` knows by name."""
PLACEHOLDER_MODEL = "models/your-model"
PLACEHOLDER_DATA = "data/train.parquet"


@dataclass(frozen=True)
class Imported:
    """`config` is what a person would write: only what TRL's config says. It passes RunConfig."""

    config: dict[str, Any]
    lines: list[str]


def import_trl(given: Mapping[str, Any], *, num_processes: int = 1) -> Imported:
    """Raises InvalidConfig for values that TRL or RunConfig refuses."""
    trl = TrlSource(given, num_processes)
    try:
        config = _config(trl)
    except ValueError as error:
        remedy = "correct the TRL config; TRL refuses this too"
        raise InvalidConfig([Problem("", "", str(error), remedy)]) from error
    trl.say_what_has_no_equal()
    load_config(config, "the imported config")
    return Imported(config, trl.lines)


def _config(trl: TrlSource) -> dict[str, Any]:
    return {
        "name": _name(trl),
        "tags": ["trl"],
        "seed": trl.whole("seed"),
        "deterministic": bool(trl["full_determinism"]),
        "dtype": _dtype(trl),
        "model": _model(trl),
        "adapter": _adapter(trl),
        "rollout": trl_rollout.rollout(trl),
        "stages": [_stage(trl)],
        "needs": {"device": "cpu" if trl["use_cpu"] else "cuda", "num_ranks": trl.num_processes},
    }


def _stage(trl: TrlSource) -> dict[str, Any]:
    rewards = _rewards(trl)
    batches = trl_stage.batches(trl)
    steps = trl_stage.num_steps(trl, batches)
    return {
        "kind": "rl",
        "data": _data(trl, rewards),
        "rewards": rewards,
        "num_steps": steps,
        **batches,
        "sampling": trl_stage.sampling(trl),
        "advantage": trl_stage.advantage(trl),
        "loss": trl_stage.loss(trl),
        "kl": trl_stage.kl(trl),
        "entropy": trl_stage.entropy(trl),
        "correction": trl_stage.correction(trl),
        "mask_truncated": bool(trl["mask_truncated_completions"]),
        "memory": trl_stage.memory(trl),
        "optimizer": trl_stage.optimizer(trl, steps),
        "evaluation": trl_stage.evaluation(trl, steps),
        "checkpoint": trl_stage.checkpoint(trl, steps),
    }


def _name(trl: TrlSource) -> str:
    return str(trl["run_name"] or PurePath(str(trl["output_dir"] or "")).name or "imported from TRL")[:200]


def _dtype(trl: TrlSource) -> str:
    """TRL computes in bfloat16 unless told otherwise."""
    chosen = trl["bf16"] if trl["bf16"] is not None else not trl["fp16"]
    return "bfloat16" if chosen else "float32"


# ---------------------------------------------------------------- model
def _model(trl: TrlSource) -> dict[str, Any]:
    name = trl["model_name_or_path"]
    if name is None:
        trl.say("model_name_or_path", f"TRL is given the model in code; {PLACEHOLDER_MODEL} stands in model.path")
    elif not str(name).startswith((".", "/", "~")):
        trl.say("model_name_or_path", "TRL fetches it from the Hub; here model.path is a folder, so download it there")
    return {"source": "folder", "path": str(name or PLACEHOLDER_MODEL)}


def _adapter(trl: TrlSource) -> dict[str, Any]:
    names = ("lora_r", "lora_alpha", "lora_target_modules", "use_rslora")
    if not trl["use_peft"]:
        trl.say_if_given("has no effect without use_peft", *names)
        return {"kind": "none"}
    if "lora_dropout" not in trl.given:
        trl.say("lora_dropout", "adapters here have no dropout, so that ratios stay exact")
    rank, alpha = trl.whole("lora_r"), trl.number("lora_alpha")
    if trl["lora_target_modules"] is None:
        trl.say(
            "lora_target_modules", "peft then chooses by model, often q_proj and v_proj; here all linear layers get one"
        )
    listed = trl.words("lora_target_modules")
    scaled = (
        alpha * rank**0.5 if trl["use_rslora"] else alpha
    )  # rsLoRA scales by alpha / sqrt(rank), LoRA by alpha / rank
    return {"kind": "lora", "rank": rank, "alpha": scaled, "target_modules": [n for n in listed if n != "all-linear"]}


# ---------------------------------------------------------------- data and rewards
def _data(trl: TrlSource, rewards: list[dict[str, Any]]) -> dict[str, Any]:
    name = trl["dataset_name"]
    if name is None:
        trl.say("dataset_name", f"TRL is given the dataset in code; {PLACEHOLDER_DATA} stands in data.path")
    elif not str(name).endswith((".jsonl", ".parquet")):
        trl.say(
            "dataset_name", f"TRL loads it from the Hub; save it as one file, {PLACEHOLDER_DATA} stands in data.path"
        )
    if not trl["shuffle_dataset"]:
        trl.say("shuffle_dataset", "TRL keeps the dataset's order; prompts here always come in an order by the seed")
    is_file = name is not None and str(name).endswith((".jsonl", ".parquet"))
    answer = "solution" if any(part["kind"] == "accuracy" for part in rewards) else None
    data = {"source": "file", "path": str(name) if is_file else PLACEHOLDER_DATA, "prompt_column": "prompt"}
    return data | {"answer_column": answer, "chat_template": True}


def _rewards(trl: TrlSource) -> list[dict[str, Any]]:
    listed = trl.words("reward_funcs")
    if not listed:
        trl.say("reward_funcs", "TRL is given its rewards in code; the accuracy reward stands there")
    parts = [_reward(trl, name) for name in listed] or [dict(REWARDS["reasoning_accuracy_reward"])]
    weights = trl["reward_weights"]
    if weights is None:
        weights = [1.0] * len(parts)
    elif not isinstance(weights, list):
        raise ValueError(f"reward_weights = {show(weights)} is not a list of numbers")
    elif len(weights) != len(parts):
        if listed:
            raise ValueError(f"{len(weights)} reward_weights for {len(parts)} reward_funcs")
        trl.say("reward_weights", "they belong to rewards given in code; set each part's weight")
        weights = [1.0] * len(parts)
    alone = {} if trl["multi_objective_aggregation"] == "sum_then_normalize" else {"normalize": "group"}
    return [part | {"weight": weight} | alone for part, weight in zip(parts, weights, strict=True)]


def _reward(trl: TrlSource, name: str) -> dict[str, Any]:
    if name in REWARDS:
        if REWARDS[name]["kind"] == "accuracy":
            trl.say("reward_funcs", f"{name} compares LaTeX by math_verify; here so do formulas, and numbers are exact")
        return dict(REWARDS[name])
    own = re.sub(r"[^a-z0-9_]", "_", name.rpartition(".")[2].lower()).lstrip("_0123456789")[:64] or "reward"
    trl.say("reward_funcs", f"{name} is your own code; give it with --reward {own}=FILE, as f(completions, **columns)")
    return {"kind": "custom", "name": own}
