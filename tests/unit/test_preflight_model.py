"""What the preflight reads of a model folder, against the model itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from grpo_engine.checks.memory import estimate
from grpo_engine.checks.model_folder import inspect_model
from grpo_engine.checks.report import Report
from grpo_engine.config import FolderModel, TinyLlamaModel
from grpo_engine.config_errors import load_config
from grpo_engine.model.loading import load_policy
from grpo_engine.model.mtp import MTPHeads
from tests.invalid_configs import changed

TINY = TinyLlamaModel(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=48, max_context_tokens=64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    policy = load_policy(TINY, seed=0, dtype="float32", device=torch.device("cpu"))
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_parameters_are_counted_as_the_model_has_them(folder: Path) -> None:
    policy = load_policy(TINY, seed=0, dtype="float32", device=torch.device("cpu"))
    count = sum(parameter.numel() for parameter in policy.model.parameters())
    for config in (TINY, FolderModel(path=str(folder))):
        shape, tokenizer = inspect_model(config, Report())
        assert shape is not None
        assert tokenizer is not None
        assert (shape.num_parameters, shape.max_context_tokens, shape.head_size) == (count, 64, 16)
        assert tokenizer("7+5=").input_ids == policy.tokenizer("7+5=").input_ids


def test_a_tokenizer_larger_than_the_model_is_a_problem(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"vocab_size": 10}))
    report = Report()
    inspect_model(FolderModel(path=str(folder)), report)
    assert "the model only 10" in report.problems[0].message


@pytest.mark.parametrize(
    ("file", "content"), [("config.json", "{"), ("config.json", "{}"), ("model.safetensors", "no")]
)
def test_torn_files_are_problems_not_crashes(folder: Path, file: str, content: str) -> None:
    (folder / file).write_text(content)
    report = Report()
    assert inspect_model(FolderModel(path=str(folder)), report)[0] is None
    assert [problem.field for problem in report.problems] == ["model.path"]


def test_memory_follows_its_formula() -> None:
    shape, _ = inspect_model(TINY, Report())
    assert shape is not None
    memory = estimate(load_config(changed({"stages.0.group_size": 2, "stages.0.prompts_per_step": 4})), shape, [40])
    assert memory["optimizer_bytes"] == 8 * shape.num_parameters
    assert memory["reference_bytes"] == 4 * shape.num_parameters
    assert memory["activations_bytes"] == 8 * 40 * 2 * (14 * 32 + 4 * 48) * 4
    assert memory["kv_cache_bytes"] == 8 * 40 * 2 * 2 * 2 * 16 * 4


def memory_of(**changes: object) -> dict[str, int]:
    """Of a stage with 8 rows of 40 tokens."""
    shape, _ = inspect_model(TINY, Report())
    assert shape is not None
    small = {"stages.0.group_size": 2, "stages.0.prompts_per_step": 4, "stages.0.evaluation.num_prompts": 1}
    return estimate(load_config(changed(small | changes)), shape, [40])


def test_the_micro_batch_bounds_the_activations_and_recomputing_keeps_one_layer_whole() -> None:
    memory = {"stages.0.memory": {"max_micro_batch_tokens": 80}}
    kept = {
        kind: memory_of(**{"stages.0.memory": {"max_micro_batch_tokens": 80, "gradient_checkpointing": kind}})
        for kind in ("full", "attention", "feed_forward")
    }
    attention, feed_forward = 8 * 32, 6 * 32 + 4 * 48
    assert memory_of(**memory)["activations_bytes"] == 80 * 4 * 2 * (attention + feed_forward)
    assert kept["full"]["activations_bytes"] == 80 * 4 * (2 * 32 + attention + feed_forward)
    assert kept["attention"]["activations_bytes"] == 80 * 4 * (2 * (32 + feed_forward) + attention)
    assert kept["feed_forward"]["activations_bytes"] == 80 * 4 * (2 * (32 + attention) + feed_forward)


def test_adapters_need_neither_a_reference_nor_a_large_optimizer() -> None:
    memory = memory_of(adapter={"kind": "lora", "rank": 4, "target_modules": ["q_proj", "down_proj"]})
    adapter = 4 * 2 * ((32 + 32) + (48 + 32))
    assert memory["adapter_parameters"] == adapter
    assert (memory["gradients_bytes"], memory["optimizer_bytes"]) == (4 * adapter, 8 * adapter)
    assert memory["reference_bytes"] == 0


def test_every_linear_layer_is_adapted_when_none_is_named() -> None:
    policy = load_policy(TINY, seed=0, dtype="float32", device=torch.device("cpu"))
    linear = [m for n, m in policy.model.named_modules() if isinstance(m, torch.nn.Linear) and "lm_head" not in n]
    expected = 16 * sum(layer.in_features + layer.out_features for layer in linear)
    assert memory_of(adapter={"kind": "lora"})["adapter_parameters"] == expected


def test_a_copied_critic_counts_as_a_second_model_in_training_and_a_shared_one_as_its_head() -> None:
    plain = memory_of()
    gae = {kind: {"stages.0.advantage": {"kind": "gae", "value": {"backbone": kind}}} for kind in ("copied", "shared")}
    copied, shared = memory_of(**gae["copied"]), memory_of(**gae["shared"])
    assert copied["critic_bytes"] == 16 * (plain["parameters"] + 33)
    assert copied["activations_bytes"] == 2 * plain["activations_bytes"]
    assert shared["critic_bytes"] == 16 * 33
    assert "critic_bytes" not in plain


def test_prediction_heads_count_as_they_are_made() -> None:
    policy = load_policy(TINY, seed=0, dtype="float32", device=torch.device("cpu"))
    heads = MTPHeads(policy.model, 2, seed=0)
    assert memory_of(mtp={"depth": 2})["mtp_bytes"] == 16 * sum(p.numel() for p in heads.parameters())
    assert "mtp_bytes" not in memory_of()


def test_every_rank_holds_the_model_and_its_share_of_the_rows() -> None:
    one, two = memory_of(), memory_of(**{"needs.num_ranks": 2})
    assert two["total_bytes"] == 2 * two["rank_bytes"]
    assert two["activations_bytes"] == one["activations_bytes"] // 2
    assert two["weights_bytes"] == one["weights_bytes"]
