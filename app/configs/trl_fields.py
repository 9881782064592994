"""Every field of a TRL 1.16.0 GRPO config: its default, and either where it goes here or why it has no equal.

`FIELDS` are GRPOConfig's own 77; `TRAINER` those it has from transformers' TrainingArguments as far as they change
training; `SCRIPT` those of `trl grpo --config`. A sentence says what TRL means by the field and what to do here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TrlField:
    default: Any
    sentence: str = ""
    """Why it has no equal and what to do; empty when it is mapped."""


def _none(default: Any, sentence: str) -> TrlField:
    return TrlField(default, sentence)


_TRANSFER = "sets up TRL's weight transfer between processes; here servers are told a file, or take tensors in process"
_SAPO = "belongs to the sapo loss, which has no equal; use clip or cispo"
_VESPO = "belongs to the vespo loss, which has no equal; use gspo or cispo"
_ADAPTIVE = "belongs to the entropy coefficient that adapts itself, which has no equal; choose entropy.bonus"
_LOGGED = "chooses what is printed or uploaded; every completion is kept and can be read on the run's pages"
_KERNEL = "chooses how transformers generates; the decoder here batches and caches by itself, so leave it out"
_REFERENCE = (
    "moves the reference towards the policy during training; here it stays the stage's start, so use two stages"
)

FIELDS: dict[str, TrlField] = {
    "model_init_kwargs": _none(
        None, "are arguments of from_pretrained; prepare the model folder as you want it loaded"
    ),
    "trust_remote_code": _none(False, "runs code of the model's repository; here only transformers' own models load"),
    "router_aux_loss_coef": _none(
        None, "weighs the load-balancing loss of mixture-of-experts models; there is none here"
    ),
    "disable_dropout": _none(False, "turns dropout off; here it always is, so leave it out"),
    "cast_lm_head_to_fp32": _none(False, "casts the output head; log-probabilities here are float32 in any dtype"),
    "num_generations": TrlField(8),
    "num_generations_eval": _none(
        None, "samples several answers in evaluation; here it takes the greedy one and one sample"
    ),
    "max_completion_length": TrlField(512),
    "ds3_gather_for_generation": _none(True, "belongs to DeepSpeed ZeRO-3; every rank here holds the whole model"),
    "shuffle_dataset": TrlField(True),
    "pad_to_multiple_of": _none("auto", "pads for the device's sake; rows here are packed without padding"),
    "generation_batch_size": TrlField(None),
    "steps_per_generation": TrlField(None),
    "temperature": TrlField(1.0),
    "top_p": TrlField(1.0),
    "top_k": TrlField(0),
    "min_p": TrlField(None),
    "generation_kwargs": _none(
        None, "are arguments of generate; here only temperature, top_k, top_p and min_p shape sampling"
    ),
    "chat_template_kwargs": _none(None, "are arguments of the chat template; write them into the tokenizer's template"),
    "repetition_penalty": _none(
        1.0, "changes the sampled distribution apart from the trained one; it is not sampled here"
    ),
    "cache_implementation": _none(None, _KERNEL),
    "use_vllm": TrlField(False),
    "vllm_mode": TrlField("colocate"),
    "vllm_model_impl": _none("vllm", "chooses whose model code runs inside vLLM; here it is vLLM's own"),
    "vllm_enable_sleep_mode": TrlField(False),
    "vllm_structured_outputs_regex": _none(
        None, "forces completions into a pattern; use a reward part that judges the form"
    ),
    "vllm_server_base_url": TrlField(None),
    "vllm_server_host": TrlField("0.0.0.0"),
    "vllm_server_port": TrlField(8000),
    "vllm_server_timeout": _none(
        240.0, "is how long TRL waits for a server to start; here rollout.request_timeout_s bounds each request"
    ),
    "vllm_group_port": _none(51216, _TRANSFER),
    "vllm_gpu_memory_utilization": TrlField(0.3),
    "vllm_max_model_length": TrlField(None),
    "vllm_tensor_parallel_size": _none(1, "splits a model over GPUs; each vLLM here holds it on one device"),
    "beta": TrlField(0.0),
    "num_iterations": TrlField(1),
    "epsilon": TrlField(0.2),
    "delta": TrlField(None),
    "epsilon_high": TrlField(None),
    "sapo_temperature_neg": _none(1.05, _SAPO),
    "sapo_temperature_pos": _none(1.0, _SAPO),
    "vespo_k_pos": _none(2.0, _VESPO),
    "vespo_lambda_pos": _none(3.0, _VESPO),
    "vespo_k_neg": _none(3.0, _VESPO),
    "vespo_lambda_neg": _none(2.0, _VESPO),
    "importance_sampling_level": TrlField("token"),
    "reward_weights": TrlField(None),
    "multi_objective_aggregation": TrlField("sum_then_normalize"),
    "scale_rewards": TrlField("group"),
    "loss_type": TrlField("dapo"),
    "mask_truncated_completions": TrlField(False),
    "sync_ref_model": _none(False, _REFERENCE),
    "ref_model_mixup_alpha": _none(0.6, _REFERENCE),
    "ref_model_sync_steps": _none(512, _REFERENCE),
    "top_entropy_quantile": TrlField(1.0),
    "entropy_coef": TrlField(0.0),
    "use_adaptive_entropy": _none(False, _ADAPTIVE),
    "entropy_coef_min": _none(0.0, _ADAPTIVE),
    "entropy_coef_max": _none(1.0, _ADAPTIVE),
    "entropy_coef_delta": _none(0.005, _ADAPTIVE),
    "entropy_target": _none(0.2, _ADAPTIVE),
    "max_tool_calling_iterations": _none(None, "bounds an agent's turns; a completion here is one turn"),
    "vllm_importance_sampling_correction": TrlField(True),
    "vllm_importance_sampling_mode": TrlField("sequence_mask"),
    "vllm_importance_sampling_clip_max": TrlField(3.0),
    "vllm_importance_sampling_clip_min": TrlField(None),
    "off_policy_mask_threshold": _none(
        None,
        "drops sequences with a negative advantage and a large KL to the old policy; correction mask drops by ratio",
    ),
    "use_bias_correction_kl": TrlField(True),
    "log_completions": _none(False, _LOGGED),
    "log_multimodal": _none(True, _LOGGED),
    "num_completions_to_print": _none(None, _LOGGED),
    "log_unique_prompts": _none(False, _LOGGED),
    "log_completions_hub_repo": _none(None, _LOGGED),
    "use_transformers_continuous_batching": _none(False, _KERNEL),
    "transformers_continuous_batching_config": _none(None, _KERNEL),
    "use_transformers_paged": _none(False, _KERNEL),
    "vllm_importance_sampling_cap": TrlField(None),
}

TRAINER: dict[str, TrlField] = {
    "output_dir": TrlField(None),
    "run_name": TrlField(None),
    "seed": TrlField(42),
    "data_seed": _none(None, "seeds the order of prompts alone; one seed serves all here"),
    "full_determinism": TrlField(False),
    "use_cpu": TrlField(False),
    "bf16": TrlField(None),
    "fp16": _none(False, "computes in float16, which needs loss scaling; use dtype bfloat16 or float32"),
    "per_device_train_batch_size": TrlField(8),
    "gradient_accumulation_steps": TrlField(1),
    "gradient_checkpointing": TrlField(True),
    "num_train_epochs": TrlField(3.0),
    "max_steps": TrlField(-1),
    "learning_rate": TrlField(1e-6),
    "lr_scheduler_type": TrlField("linear"),
    "lr_scheduler_kwargs": _none(
        None, "shapes the schedule further; here optimizer.final_rate_share is its only shape"
    ),
    "warmup_steps": TrlField(0),
    "warmup_ratio": TrlField(0.0),
    "optim": TrlField("adamw_torch_fused"),
    "optim_args": _none(None, "are arguments of the optimizer; AdamW's are fields of optimizer"),
    "weight_decay": TrlField(0.0),
    "adam_beta1": TrlField(0.9),
    "adam_beta2": TrlField(0.999),
    "adam_epsilon": TrlField(1e-8),
    "max_grad_norm": TrlField(1.0),
    "eval_strategy": TrlField("no"),
    "eval_steps": TrlField(None),
    "logging_steps": _none(10, "sets up logging, and evaluation without eval_steps; every step is journaled here"),
    "save_strategy": TrlField("steps"),
    "save_steps": TrlField(500),
    "save_total_limit": TrlField(None),
    "resume_from_checkpoint": _none(None, "continues an older run; start from a checkpoint on its page"),
    "neftune_noise_alpha": _none(None, "adds noise to embeddings; there is none here"),
    "label_smoothing_factor": _none(0.0, "smooths labels; policy losses have none"),
    "deepspeed": _none(None, "shards model and optimizer; every rank here holds the whole model"),
    "fsdp": _none(None, "shards model and optimizer; every rank here holds the whole model"),
    "torch_compile": _none(False, "compiles the model; it runs eagerly here"),
    "use_liger_kernel": _none(False, "fuses kernels; log-probabilities here are computed in chunks by themselves"),
    "tf32": _none(None, "allows TF32 matrix products; there is no such switch here"),
}

SCRIPT: dict[str, TrlField] = {
    "model_name_or_path": TrlField(None),
    "model_revision": _none("main", "chooses a revision on the Hub; download the one you want into the model folder"),
    "dtype": _none(
        "float32", "is the type of the loaded weights; masters here are float32, and dtype is the compute type"
    ),
    "torch_dtype": _none(
        "float32", "is the type of the loaded weights; masters here are float32, and dtype is the compute type"
    ),
    "attn_implementation": _none(None, "chooses the attention kernel; the packed one here is chosen by a probe"),
    "use_peft": TrlField(False),
    "lora_r": TrlField(16),
    "lora_alpha": TrlField(32),
    "lora_dropout": _none(0.05, "drops adapter inputs at random; adapters here have no dropout, so ratios stay exact"),
    "lora_target_modules": TrlField(None),
    "lora_target_parameters": _none(None, "adapts bare parameters; adapters here sit on linear layers"),
    "lora_modules_to_save": _none(None, "trains further modules whole; with adapters the base stays untouched here"),
    "lora_task_type": _none("CAUSAL_LM", "is always CAUSAL_LM here"),
    "use_rslora": TrlField(False),
    "use_dora": _none(False, "decomposes weights into size and direction; adapters here are plain LoRA"),
    "load_in_8bit": _none(False, "quantises the base; it is float32 here"),
    "load_in_4bit": _none(False, "quantises the base; it is float32 here"),
    "bnb_4bit_quant_type": _none("nf4", "quantises the base; it is float32 here"),
    "use_bnb_nested_quant": _none(False, "quantises the base; it is float32 here"),
    "bnb_4bit_quant_storage": _none(None, "quantises the base; it is float32 here"),
    "dataset_name": TrlField(None),
    "dataset_config": _none(None, "chooses a part of a Hub dataset; save the part you want as one file"),
    "dataset_train_split": _none("train", "chooses a split; save it as one file and name that in data.path"),
    "dataset_test_split": _none(
        "test", "chooses the evaluation's split; append its rows to the file and set data.held_out_rows"
    ),
    "dataset_streaming": _none(False, "streams the dataset; a file is read here"),
    "streaming": _none(False, "streams the dataset; a file is read here"),
    "datasets": _none([], "mixes datasets; write the mixture into one file and name it in data.path"),
    "test_split_size": _none(None, "splits off an evaluation set; set data.held_out_rows"),
    "ignore_bias_buffers": _none(False, "is a workaround for DDP; gradients are summed by hand here"),
    "reward_model_name_or_path": _none(
        None, "scores with a reward model; register a function that calls it as custom reward"
    ),
    "reward_funcs": TrlField(None),
}

GROUPS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("logging_", "log_", "report_to", "disable_tqdm", "project", "trackio", "include_num_input"),
        "sets up logging; every step is journaled and shown here, so leave it out",
    ),
    (("hub_", "push_to_hub"), "uploads to the Hub; download a checkpoint from its page and upload that"),
    (
        (
            "dataloader_",
            "accelerator_config",
            "remove_unused_columns",
            "label_names",
            "length_column",
            "train_sampling",
        ),
        "sets up loading of data; prompts come from data in an order by the seed",
    ),
    (
        ("ddp_", "fsdp_", "parallelism_config", "local_rank", "average_tokens"),
        "sets up distribution; needs.num_ranks is the number of training processes, and denominators are global",
    ),
    (
        (
            "eval_",
            "per_device_eval",
            "bf16_full",
            "fp16_full",
            "prediction_loss",
            "batch_eval",
            "include_for_metrics",
            "do_",
        ),
        "sets up TRL's evaluation; evaluation.every_steps and num_prompts do here",
    ),
    (
        (
            "save_",
            "load_best",
            "metric_for_best",
            "greater_is_better",
            "enable_jit",
            "ignore_data_skip",
            "restore_callback",
        ),
        "sets up checkpoints; they hold everything to resume exactly, at checkpoint.every_steps",
    ),
    (
        (
            "gradient_checkpointing_kwargs",
            "torch_",
            "liger_",
            "use_cache",
            "optim_target",
            "auto_find",
            "debug",
            "skip_memory",
        ),
        "tunes how TRL computes; memory.max_micro_batch_tokens adapts by itself here",
    ),
)
"""Beginnings of the remaining fields of TrainingArguments -> what to say of them."""


def find_field(name: str) -> TrlField | None:
    """None for a name that TRL does not know."""
    for table in (FIELDS, TRAINER, SCRIPT):
        if name in table:
            return table[name]
    sentence = next((text for starts, text in GROUPS if name.startswith(starts)), "")
    return TrlField(None, sentence) if sentence else None
