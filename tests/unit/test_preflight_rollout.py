"""The preflight on what samples: vLLM missing, its memory, and what will work but perhaps not as meant."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from grpo_engine.checks.memory import estimate
from grpo_engine.checks.model_folder import inspect_model
from grpo_engine.checks.report import Report
from grpo_engine.checks.rollout import check_rollout
from grpo_engine.config_errors import load_config
from grpo_engine.preflight import check
from tests.invalid_configs import changed

SERVERS = {"backend": "vllm_server", "addresses": ["http://127.0.0.1:8000"]}


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def found(rollout: dict[str, Any], **changes: Any) -> Report:
    config, report = load_config(changed({"rollout": rollout} | changes)), Report()
    check_rollout(config, None, report)
    return report


@pytest.mark.parametrize("backend", ["vllm", "vllm_server"])
def test_vllm_that_is_not_installed_is_a_problem_with_its_remedies(without_vllm: None, backend: str) -> None:
    [problem] = found({"backend": backend}).problems
    assert (problem.field, problem.value) == ("rollout.backend", backend)
    assert "make install-vllm" in problem.remedy


def test_servers_that_run_already_need_no_vllm_here(without_vllm: None) -> None:
    assert found(SERVERS).problems == []
    elsewhere = {"addresses": ["https://gpu-7"], "weights_folder": "/shared/weights"}
    assert found(SERVERS | elsewhere).problems == []
    assert found({"backend": "torch"}).problems == []


@pytest.mark.parametrize(
    ("rollout", "changes", "field"),
    [
        (SERVERS, {"deterministic": True}, "rollout.backend"),
        ({"backend": "vllm", "sleep": True}, {}, "rollout.sleep"),
        (SERVERS, {"mtp": {"depth": 1}}, "mtp.depth"),
    ],
)
def test_what_will_not_work_as_meant_is_warned_of(rollout: dict[str, Any], changes: Any, field: str) -> None:
    assert [warning.field for warning in found(rollout, **changes).warnings] == [field]


def test_draft_heads_inside_vllm_are_said_to_fall_behind(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_nextn_predict_layers": 1}))
    for speculation in ({"method": "eagle", "model": str(tmp_path)}, {"method": "mtp"}):
        model = {"source": "folder", "path": str(tmp_path)}
        report = found(SERVERS | {"speculation": speculation}, model=model)
        assert report.problems == []
        assert "ever fewer drafts" in report.warnings[0].message
    assert found(SERVERS | {"speculation": {"method": "ngram"}}).warnings == []


def test_completions_that_vllms_context_cuts_are_warned_of() -> None:
    report = check(load_config(changed({"rollout": SERVERS | {"max_model_len": 20}})), {})
    assert report.problems == []
    [warning] = report.warnings
    assert warning.field == "rollout.max_model_len"
    assert "up to 24 tokens" in warning.message


@pytest.mark.parametrize(
    "rollout", [{"backend": "torch"}, SERVERS | {"max_model_len": 40}, SERVERS | {"max_model_len": 64}]
)
def test_prompts_that_will_be_left_out_are_counted(rollout: dict[str, Any], tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(8)]
    rows[3]["prompt"] = "1+" * 40
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"source": "file", "path": str(tmp_path / "rows.jsonl"), "held_out_rows": 1}
    config = changed({"stages.0.data": data, "stages.0.evaluation.num_prompts": 1, "rollout": rollout})
    report = check(load_config(config), {})
    assert report.problems == []
    assert [(w.field, "1 of 8 prompts" in w.message) for w in report.warnings] == [("stages.0.data", True)]


@pytest.mark.parametrize(
    ("rollout", "copies"),
    [({"backend": "vllm"}, 1), ({"backend": "vllm_server", "num_servers": 3}, 3), (SERVERS, 0)],
)
def test_vllm_holds_the_policy_again_and_its_own_cache(rollout: dict[str, Any], copies: int) -> None:
    config = load_config(changed({"rollout": rollout | {"cpu_cache_gib": 2}}))
    shape, _ = inspect_model(config.model, Report())
    assert shape is not None
    uses = estimate(config, shape, [40])
    assert uses.get("vllm_bytes", 0) == copies * (4 * shape.num_parameters + 2 * 2**30)
    assert uses["kv_cache_bytes"] == 0


def test_the_cache_of_our_decoder_is_bounded_by_its_rows() -> None:
    config = load_config(changed({"rollout": {"backend": "torch", "max_rows": 8}}))
    shape, _ = inspect_model(config.model, Report())
    assert shape is not None
    whole = estimate(load_config(changed({})), shape, [40])["kv_cache_bytes"]
    assert estimate(config, shape, [40])["kv_cache_bytes"] == whole * 8 // 256
