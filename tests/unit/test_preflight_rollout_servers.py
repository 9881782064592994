"""The preflight on servers given by address, vLLM's context and its draft heads, case by case."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from grpo_engine.checks.report import Report, StageData
from grpo_engine.checks.rollout import check_rollout
from grpo_engine.config_errors import load_config
from tests.invalid_configs import BASE, changed

SHARED = {"backend": "vllm_server", "weights_folder": "/shared"}
HERE = {"backend": "vllm_server", "addresses": ["http://localhost:80"]}
SFT = {"kind": "sft", "data": {"source": "file", "path": "demonstrations.jsonl"}}


def found(rollout: dict[str, Any], longest: int = 10, **changes: Any) -> Report:
    """The model's context is 64 tokens, completions have 16, and each stage's longest prompt has `longest`."""
    config, report = load_config(changed({"rollout": rollout} | changes)), Report()
    for index in range(len(config.stages)):
        about = {"source": "file", "num_rows": 1, "num_held_out": 0, "num_checked": 1}
        report.data.append(
            StageData.model_validate({"stage": config.stage_key(index), "longest_prompt_tokens": longest, **about})
        )
    check_rollout(config, cast(Any, SimpleNamespace(max_context_tokens=64)), report)
    return report


@pytest.mark.parametrize(
    ("address", "word"),
    [
        ("ftp://gpu:80", "no HTTP address"), ("http://:80", "no HTTP address"), ("http://gpu:port", "is no address"),
        ("http://gpu", "has no port"), ("http://gpu:80/v1", "host and port"), ("http://gpu:80?a=1", "host and port"),
        ("http://gpu:80#a", "host and port"), ("http://me@gpu:80", "user name"),
    ],
)  # fmt: skip
def test_what_is_no_servers_address_is_refused(address: str, word: str) -> None:
    [problem] = found(SHARED | {"addresses": [address]}).problems
    assert (problem.field, problem.value) == ("rollout.addresses.0", address)
    assert word in problem.message


def test_servers_are_told_apart_and_those_of_this_host_need_no_folder() -> None:
    twice = ["http://gpu:80", "https://gpu", "http://gpu:80/", "http://gpu:80/"]
    fields = [problem.field for problem in found(SHARED | {"addresses": twice}).problems]
    assert fields == ["rollout.addresses.2", "rollout.addresses.3"]
    here = ["http://localhost:80/", "http://127.0.0.2:80", "http://[::1]:80"]
    assert found(HERE | {"addresses": here}).problems == []
    [problem] = found(HERE | {"addresses": [*here, "http://gpu:80"]}).problems
    assert problem.field == "rollout.weights_folder"
    assert "http://gpu:80 is on another host" in problem.message


@pytest.mark.parametrize(
    ("limit", "longest", "problem", "warning"),
    [
        (64, 10, "", ""), (26, 10, "", ""), (25, 10, "", "up to 26 tokens"), (10, 10, "a prompt of 10 tokens", ""),
        (11, 10, "", "up to 26 tokens"), (65, 10, "context is 64 tokens", ""),
    ],
)  # fmt: skip
def test_vllms_context_is_held_against_prompts_and_completions(
    limit: int, longest: int, problem: str, warning: str
) -> None:
    report = found(HERE | {"max_model_len": limit}, longest)
    for told, word in ((report.problems, problem), (report.warnings, warning)):
        assert len(told) == bool(word)
        assert all(word in each.message and each.field == "rollout.max_model_len" for each in told)


def test_supervised_stages_ask_nothing_of_what_samples() -> None:
    rl = BASE["stages"][0]
    assert found({"backend": "vllm"}, stages=[SFT]).problems == []
    assert found(HERE | {"max_model_len": 30}, stages=[rl]).problems == []
    mixed = found(HERE | {"max_model_len": 30}, 29, stages=[SFT, rl])
    assert ["1-rl" in warning.message for warning in mixed.warnings] == [True]


def test_sleep_is_for_gpus() -> None:
    sleeping = {"backend": "vllm", "sleep": True}
    assert [warning.field for warning in found(sleeping).warnings] == ["rollout.sleep"]
    assert found(sleeping, **{"needs.device": "cuda"}).warnings == []


@pytest.mark.parametrize(
    ("told", "has_heads"),
    [
        ({"num_nextn_predict_layers": 1}, True), ({"num_nextn_predict_layers": 0, "num_mtp_layers": None}, False),
        ({"text_config": {"mtp_num_hidden_layers": 2}}, True), ({"text_config": {}}, False), ([], True), (None, True),
    ],
)  # fmt: skip
def test_a_models_own_heads_are_looked_for_in_its_config(tmp_path: Path, told: Any, has_heads: bool) -> None:
    """A config that cannot be read is told of by whoever looks at the folder."""
    if told is not None:
        (tmp_path / "config.json").write_text(json.dumps(told))
    model = {"source": "folder", "path": str(tmp_path)}
    report = found(HERE | {"speculation": {"method": "mtp"}}, model=model)
    assert [problem.field for problem in report.problems] == ["rollout.speculation.method"] * (not has_heads)


def test_a_made_model_has_no_heads_and_ngram_needs_none() -> None:
    assert [problem.value for problem in found(HERE | {"speculation": {"method": "mtp"}}).problems] == ["mtp"]
    assert found(HERE | {"speculation": {"method": "ngram"}}).problems == []
