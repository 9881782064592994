"""The import rules that no linter sees: what must work without torch, and what without the web."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from grpo_engine.config import RunConfig

TORCH_FREE = ("config", "events", "types", "errors", "rollout_files", "manifest", "launch", "control", "failures",
              "preflight", "config_errors", "diagnostics.catalogue", "diagnostics.early_stopping",
              "diagnostics.detectors", "reward.composite", "score")  # fmt: skip


def run(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("module", TORCH_FREE)
def test_torch_free_files_load_neither_torch_nor_transformers(module):
    run(f"import sys, grpo_engine.{module}; assert not {{'torch', 'transformers'}} & set(sys.modules)")


def test_the_engine_imports_without_web_database_or_queue():
    names = "'fastapi', 'starlette', 'sqlalchemy', 'celery', 'redis', 'app', 'workers'"
    run(
        "import sys\n"
        f"for name in ({names}): sys.modules[name] = None\n"  # None makes any import of it fail
        "import grpo_engine.engine, grpo_engine.standalone, grpo_engine.rank"
    )


@pytest.mark.parametrize("path", sorted(Path("configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_presets_are_valid_and_keep_their_hash_through_json(path):
    config = RunConfig.model_validate(yaml.safe_load(path.read_text()))
    assert RunConfig.model_validate_json(config.model_dump_json()).hash() == config.hash()


def test_every_field_has_a_help_text():
    schema = RunConfig.model_json_schema()
    blocks = {"RunConfig": schema, **schema["$defs"]}
    structural = {"kind", "source", "data", "optimizer", "checkpoint", "sampling", "evaluation", "early_stopping",
                  "detectors", "model", "needs", "adapter", "advantage", "value", "loss", "kl", "entropy", "correction",
                  "auxiliary", "memory", "guards", "rollout", "backend", "drafts", "probe", "mtp",
                  "sandbox"}  # fmt: skip
    silent = [
        f"{name}.{field}"
        for name, block in blocks.items()
        for field, about in block["properties"].items()
        if "description" not in about and field not in structural
    ]
    assert silent == []
