"""A TRL GRPO config as a run config: TRL's defaults, every field mapped or told, what TRL refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.configs.trl import Imported, import_trl
from app.configs.trl_fields import FIELDS, SCRIPT, TRAINER, find_field
from grpo_engine.config import RLStage, RunConfig
from grpo_engine.config_errors import load_config
from grpo_engine.config_rollout import VLLMRollout, VLLMServerRollout
from grpo_engine.errors import InvalidConfig
from tests.typed import Typed

CHANGED: dict[str, Any] = {
    "model_init_kwargs": {"a": 1}, "trust_remote_code": True, "router_aux_loss_coef": 0.1, "disable_dropout": True,
    "cast_lm_head_to_fp32": True, "num_generations": 4, "num_generations_eval": 2, "max_completion_length": 99,
    "ds3_gather_for_generation": False, "shuffle_dataset": False, "pad_to_multiple_of": 8,
    "generation_batch_size": 32, "steps_per_generation": 4, "temperature": 0.7, "top_p": 0.9, "top_k": 4,
    "min_p": 0.1, "generation_kwargs": {"num_beams": 2}, "chat_template_kwargs": {"a": 1}, "repetition_penalty": 1.1,
    "cache_implementation": "static", "use_vllm": True, "vllm_mode": "server", "vllm_model_impl": "transformers",
    "vllm_enable_sleep_mode": True, "vllm_structured_outputs_regex": "a", "vllm_server_base_url": "b",
    "vllm_server_host": "h", "vllm_server_port": 1, "vllm_server_timeout": 1.0, "vllm_group_port": 1,
    "vllm_gpu_memory_utilization": 0.5, "vllm_max_model_length": 10, "vllm_tensor_parallel_size": 2, "beta": 0.04,
    "num_iterations": 2, "epsilon": 0.1, "delta": 3.0, "epsilon_high": 0.28, "sapo_temperature_neg": 1.0,
    "sapo_temperature_pos": 2.0, "vespo_k_pos": 1.0, "vespo_lambda_pos": 1.0, "vespo_k_neg": 1.0,
    "vespo_lambda_neg": 1.0, "importance_sampling_level": "sequence", "reward_weights": [1.0, 2.0],
    "multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "none", "loss_type": "dr_grpo",
    "mask_truncated_completions": True, "sync_ref_model": True, "ref_model_mixup_alpha": 0.5,
    "ref_model_sync_steps": 10, "top_entropy_quantile": 0.2, "entropy_coef": 0.01, "use_adaptive_entropy": True,
    "entropy_coef_min": 0.1, "entropy_coef_max": 0.5, "entropy_coef_delta": 0.01, "entropy_target": 0.5,
    "max_tool_calling_iterations": 3, "vllm_importance_sampling_correction": False,
    "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0,
    "vllm_importance_sampling_clip_min": 0.5, "off_policy_mask_threshold": 0.5, "use_bias_correction_kl": False,
    "log_completions": True, "log_multimodal": False, "num_completions_to_print": 3, "log_unique_prompts": True,
    "log_completions_hub_repo": "me/it", "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"a": 1}, "use_transformers_paged": True,
    "vllm_importance_sampling_cap": 2.5,
}  # fmt: skip
"""Each of the 77 fields with another value than its default."""
RICH = """
model_name_or_path: ./models/mine
dataset_name: data/sums.jsonl
reward_funcs: [accuracy_reward, think_format_reward, my_lib.rewards.Brevity]
reward_weights: [1.0, 0.2, 0.1]
use_peft: true
lora_r: 16
lora_alpha: 32
use_rslora: true
lora_target_modules: [q_proj, v_proj]
loss_type: cispo
epsilon_high: 5.0
beta: 1e-3
use_vllm: true
vllm_importance_sampling_mode: token_truncate
learning_rate: 1e-5
lr_scheduler_type: cosine
warmup_steps: 0.1
per_device_train_batch_size: 8
gradient_accumulation_steps: 2
steps_per_generation: 8
num_iterations: 2
max_steps: 101
logging_steps: 1
"""


def stage_of(found: Imported) -> RLStage:
    stage = RunConfig.model_validate(found.config).stages[0]
    assert isinstance(stage, RLStage)
    return stage


def imported(**given: Any) -> RLStage:
    return stage_of(import_trl(given))


def lines(**given: Any) -> str:
    return "\n".join(import_trl(given).lines)


def test_an_empty_file_means_trls_defaults_not_ours() -> None:
    found = import_trl({})
    config, stage = RunConfig.model_validate(found.config), stage_of(found)
    assert (config.seed, config.dtype, config.needs.device) == (42, "bfloat16", "cuda")
    assert (stage.prompts_per_step, stage.group_size, stage.sampling.max_new_tokens) == (1, 8, 512)
    assert (stage.optimizer.beta2, stage.optimizer.schedule, stage.optimizer.learning_rate) == (0.999, "linear", 1e-6)
    assert (stage.kl.weight, stage.kl.track, stage.memory.gradient_checkpointing) == (0, False, "full")
    assert (stage.loss.kind, stage.loss.normalizer, stage.advantage.kind) == ("clip", "tokens", "grpo")


def test_every_one_of_the_77_fields_is_in_the_table_and_has_a_changed_value() -> None:
    assert len(FIELDS) == 77
    assert CHANGED.keys() == FIELDS.keys()
    assert all(CHANGED[name] != field.default for name, field in FIELDS.items())


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_changes_the_config_or_has_a_line(name: str) -> None:
    before, after = import_trl({}), import_trl({name: CHANGED[name]})
    told = [line for line in after.lines if line.startswith(f"{name} = ")]
    assert after.config != before.config or told
    assert bool(find_field(name).sentence) <= bool(told)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", [*TRAINER, *SCRIPT])
def test_fields_of_the_trainer_and_of_the_script_are_never_dropped_silently(name: str) -> None:
    odd: dict[str, Any] = {
        "bf16": False, "save_strategy": "no", "eval_strategy": "steps", "optim": "adafactor", "learning_rate": 0.1,
        "adam_beta1": 0.5, "adam_beta2": 0.5, "per_device_train_batch_size": 16, "gradient_checkpointing": False,
        "lora_target_modules": "q_proj", "reward_funcs": "think_format_reward",
    }  # fmt: skip
    value = odd.get(name, 7 if isinstance(find_field(name).default, int | float | None) else "other")  # type: ignore[union-attr]
    given = {name: value, "use_peft": True} if name.startswith(("lora", "use_")) else {name: value}
    base = {} if name == "use_peft" else {key: given[key] for key in given if key != name}
    before, after = import_trl(base), import_trl(given)
    assert after.config != before.config or any(line.startswith(f"{name} = ") for line in after.lines)


def test_a_rich_file_becomes_what_it_means() -> None:
    found = import_trl(yaml.safe_load(RICH))
    config, stage = RunConfig.model_validate(found.config), stage_of(found)
    assert config.adapter.model_dump() == {
        "kind": "lora", "rank": 16, "alpha": 128.0, "target_modules": ["q_proj", "v_proj"],
    }  # fmt: skip
    assert [(part.kind, part.weight) for part in stage.rewards] == [
        ("accuracy", 1.0), ("format", 0.2), ("custom", 0.1),
    ]  # fmt: skip
    assert stage.loss.model_dump() == {"kind": "cispo", "clip_low": None, "clip_high": 4.0, "normalizer": "tokens"}
    assert (stage.prompts_per_step, stage.minibatches, stage.epochs, stage.num_steps) == (8, 4, 2, 104)
    assert stage.correction.model_dump() == {
        "kind": "truncate", "level": "token", "min_weight": 0.0, "max_weight": 3.0,
    }  # fmt: skip
    assert (stage.kl.weight, stage.kl.unbiased, stage.kl.track) == (0.001, True, True)
    assert (stage.optimizer.warmup_steps, stage.optimizer.schedule) == (11, "cosine")
    told = "\n".join(found.lines)
    for name in ("max_steps = 101", "logging_steps", "use_vllm", "lora_dropout", "brevity=FILE"):
        assert name in told


@pytest.mark.parametrize(
    ("given", "loss"),
    [
        ({"loss_type": "grpo"}, {"kind": "clip", "clip_low": 0.2, "clip_high": 0.2, "normalizer": "sequences"}),
        ({"loss_type": "dr_grpo"}, {"kind": "clip", "clip_low": 0.2, "clip_high": 0.2, "normalizer": "constant"}),
        ({"loss_type": "bnpo"}, {"kind": "clip", "clip_low": 0.2, "clip_high": 0.2, "normalizer": "tokens"}),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
            {"kind": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "normalizer": "sequences"},
        ),
        (
            {"delta": 3.0, "epsilon_high": 0.28},
            {"kind": "clip", "clip_low": 0.2, "clip_high": 0.28, "normalizer": "tokens", "dual_clip": 3.0},
        ),
        ({"delta": 1.1}, {"kind": "clip", "clip_low": 0.2, "clip_high": 0.2, "normalizer": "tokens"}),
        ({"loss_type": "cispo"}, {"kind": "cispo", "clip_high": 4.0, "normalizer": "tokens"}),
    ],
)
def test_losses_keep_their_meaning(given: dict[str, Any], loss: dict[str, Any]) -> None:
    assert imported(**given).loss.model_dump(exclude_none=True) == loss


@pytest.mark.parametrize(
    ("given", "every"), [({}, 10), ({"logging_steps": 25}, 25), ({"logging_steps": 25, "eval_steps": 5}, 5)]
)
def test_evaluation_without_steps_of_its_own_follows_logging_as_in_trl(given: dict[str, Any], every: int) -> None:
    config = import_trl({"eval_strategy": "steps", "max_steps": 100, **given}).config
    assert config["stages"][0]["evaluation"]["every_steps"] == every


def test_what_has_no_exact_equal_says_what_trl_means_and_what_stands_there() -> None:
    assert "each micro-batch" in lines(loss_type="bnpo")
    assert "cut every weight at 0.2" in lines(loss_type="cispo")
    assert "bounds the loss otherwise" in lines(delta=1.1)
    assert "deviation of the whole batch" in lines(scale_rewards="batch")
    assert "left out; check its spelling" in lines(learning_rat=1)
    assert "has no effect without use_vllm" in lines(vllm_importance_sampling_clip_max=2.0)


def test_vllm_in_trls_process_becomes_vllm_in_ours() -> None:
    given = {"use_vllm": True, "vllm_enable_sleep_mode": True, "vllm_gpu_memory_utilization": 0.5}
    found = import_trl({**given, "vllm_max_model_length": 2048.0})
    rollout = RunConfig.model_validate(found.config).rollout
    assert isinstance(rollout, VLLMRollout)
    assert (rollout.sleep, rollout.memory_share, rollout.max_model_len) == (True, 0.5, 2048)
    assert "make install-vllm" in "\n".join(found.lines)


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"vllm_server_host": "10.0.0.5", "vllm_server_port": 9}, "http://10.0.0.5:9"),
        ({"vllm_server_base_url": "https://gpu/v"}, "https://gpu/v"),
    ],
)
def test_a_server_of_trls_becomes_an_address(given: dict[str, Any], address: str) -> None:
    found = import_trl({"use_vllm": True, "vllm_mode": "server", **given})
    rollout = RunConfig.model_validate(found.config).rollout
    assert isinstance(rollout, VLLMServerRollout)
    assert rollout.addresses == [address]
    assert "trl vllm-serve" in "\n".join(found.lines)


def test_what_does_not_fit_the_mode_is_told() -> None:
    assert import_trl({}).config["rollout"] == {"backend": "torch"}
    assert "vllm_mode = server: has no effect without use_vllm" in lines(vllm_mode="server")
    assert "vllm_server_port = 1: has no effect in vllm_mode colocate" in lines(use_vllm=True, vllm_server_port=1)
    in_server = lines(use_vllm=True, vllm_mode="server", vllm_server_base_url="http://a", vllm_server_port=1)
    assert "vllm_server_port = 1: vllm_server_base_url decides" in in_server
    assert "memory_utilization = 0.5: is chosen where the server is started" in lines(
        use_vllm=True, vllm_mode="server", vllm_gpu_memory_utilization=0.5
    )
    assert "rollout.request_timeout_s" in lines(use_vllm=True, vllm_server_timeout=9.0)


def test_steps_and_processes_make_the_batch() -> None:
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "num_generations": 8}
    assert imported(**given).prompts_per_step == 4
    two = stage_of(import_trl(given, num_processes=2))
    assert (two.prompts_per_step, two.minibatches) == (8, 1)
    assert import_trl(given, num_processes=2).config["needs"]["num_ranks"] == 2
    several = imported(**given, steps_per_generation=2)
    assert (several.prompts_per_step, several.minibatches) == (4, 1)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"per_device_train_batch_size": 3}, "whole groups"),
        ({"generation_batch_size": 8, "steps_per_generation": 1}, "cannot both"),
        ({"generation_batch_size": 9}, "multiple"),
        ({"beta": "much"}, "beta = much is not a number"),
        ({"loss_type": "ppo"}, "is not one of dapo"),
        ({"reward_funcs": ["accuracy_reward"], "reward_weights": [1, 2]}, "2 reward_weights for 1"),
        ({"epsilon": 2.0}, "must be below 1"),
        ({"top_p": "most"}, "top_p = most is not a number"),
        ({"reward_funcs": 7}, "is not a list of names"),
        ({"reward_weights": 7}, "is not a list of numbers"),
        ({"use_vllm": True, "vllm_mode": "apart"}, "vllm_mode = apart is not one of colocate, server"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        import_trl(given)
    assert word in str(refused.value.problems[0])


def test_the_command_writes_a_config_and_prints_the_lines(typed: Typed, tmp_path: Path) -> None:
    (tmp_path / "trl.json").write_text(json.dumps({"loss_type": "bnpo", "learning_rate": 1e-5, "report_to": "none"}))
    status, output, _ = typed("import-trl", str(tmp_path / "trl.json"), "--out", str(tmp_path / "run.yaml"))
    assert status == 0
    assert "loss_type = bnpo: TRL takes the mean over the tokens of each micro-batch" in output
    config = load_config((tmp_path / "run.yaml").read_text())
    assert config.stages[0].optimizer.learning_rate == 1e-5


def test_without_out_the_config_is_printed_alone_and_the_lines_apart(typed: Typed, tmp_path: Path) -> None:
    (tmp_path / "trl.yaml").write_text("beta: 0.04\nuse_cpu: true\n")
    status, output, told = typed("import-trl", str(tmp_path / "trl.yaml"))
    assert status == 0
    assert load_config(output).needs.device == "cpu"
    assert "scale_rewards = group (TRL's default)" in told
