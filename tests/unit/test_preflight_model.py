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
