"""The preflight: what it refuses, what it shows, and that it needs neither torch nor transformers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_engine.checks.report import Report
from grpo_engine.config_errors import load_config
from grpo_engine.preflight import check
from tests.invalid_configs import CASES, PREFLIGHT, Invalid, changed, write_files

ROOT = Path(__file__).parents[2]
JUDGE = {"kind": "judge", "base_url": "http://a/v1", "model": "m", "rubric": "r", "api_key_variable": "NO_SUCH_KEY"}
CUSTOM = {"stages.0.rewards.0": {"kind": "custom", "name": "brevity"}}


def report(changes: dict[str, Any] | None = None, sources: dict[str, str] | None = None) -> Report:
    return check(load_config(changed(changes or {})), sources or {})


def write_rows(path: Path, *rows: dict[str, Any]) -> dict[str, Any]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"stages.0.data": {"source": "file", "path": str(path)}}


@pytest.mark.parametrize("case", PREFLIGHT, ids=lambda case: case.name)
def test_what_the_schema_cannot_see_is_refused_with_field_value_and_remedy(case: Invalid, tmp_path: Path) -> None:
    write_files(tmp_path)
    problems = check(load_config(case.config_text(tmp_path)), {}).problems
    assert [problem.field for problem in problems] == [case.field]
    assert case.word in problems[0].message
    assert problems[0].value
    assert problems[0].remedy


def test_a_sound_config_shows_three_prompts_gold_rewards_and_memory() -> None:
    found = report()
    assert (found.problems, found.warnings) == ([], [])
    assert [prompt.num_tokens for prompt in found.prompts] == [8, 8, 8]
    assert [gold.value for gold in found.gold_rewards] == [1.0, 1.0, 1.0]
    assert found.memory["parameters"] == 860_288
    assert found.memory["total_bytes"] > found.memory["weights_bytes"] == 4 * 860_288


@pytest.mark.parametrize("preset", ["demo", "demo-short"])
def test_presets_that_need_no_folder_pass(preset: str) -> None:
    assert check(load_config((ROOT / "configs" / f"{preset}.yaml").read_text()), {}).problems == []


def test_gym_data_is_read_and_its_gold_answers_score_one() -> None:
    data = {"source": "reasoning_gym", "task": "chain_sum", "size": 50, "chat_template": False}
    found = report({"stages.0.data": data, "stages.0.rewards.0": {"kind": "gym"}, "model.max_context_tokens": 512})
    assert found.problems == []
    assert [gold.value for gold in found.gold_rewards] == [1.0, 1.0, 1.0]


def test_a_custom_reward_is_called_on_gold_answers_when_its_source_is_given() -> None:
    found = report(CUSTOM, {"brevity": "def f(completions, **k):\n    return [1 / len(c) for c in completions]"})
    assert found.problems == []
    assert [gold.part for gold in found.gold_rewards] == ["brevity"] * 3


@pytest.mark.parametrize(
    ("source", "word"),
    [("def f(:", "line 1"), ("def f(completions, **k):\n    raise ValueError('oh')", "ValueError: oh")],
)
def test_a_broken_custom_reward_is_a_problem_with_its_error(source: str, word: str) -> None:
    [problem] = report(CUSTOM, {"brevity": source}).problems
    assert problem.field == "stages.0.rewards.0.name"
    assert word in problem.message


def test_a_custom_reward_that_may_not_be_called_is_a_warning() -> None:
    found = check(load_config(changed(CUSTOM)), {}, uncalled=["brevity"])
    assert found.problems == []
    assert [warning.field for warning in found.warnings] == ["stages.0.rewards.0.name"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"stages.0.sampling.max_new_tokens": 60}, "stages.0.sampling.max_new_tokens"),
        ({"stages.0.evaluation.num_prompts": 30, "stages.0.data.num_digits": 1}, "stages.0.evaluation.num_prompts"),
        (
            {"stages.0.rewards.0": {"kind": "length", "max_tokens": 99, "buffer_tokens": 9}},
            "stages.0.rewards.0.max_tokens",
        ),
        ({"needs.device": "cuda"}, "needs.device"),
        ({"stages.0.advantage": {"kind": "rloo", "smooth_rewards": True}}, "stages.0.advantage.smooth_rewards"),
        ({"stages.0.kl.track": False}, "stages.0.guards.max_kl"),
        ({"stages.0.rewards.0": JUDGE}, "stages.0.rewards.0.api_key_variable"),
        ({"stages.0.kl": {"place": "reward", "unbiased": True, "weight": 0.1}}, "stages.0.kl.unbiased"),
        ({"stages.0.loss": {"kind": "gspo", "normalizer": "tokens"}}, "stages.0.loss.normalizer"),
        ({"model.hidden_size": 4096, "model.num_layers": 64, "model.intermediate_size": 65536}, "model"),
    ],
)
def test_things_that_work_otherwise_than_meant_are_warnings(changes: dict[str, Any], field: str) -> None:
    found = report(changes)
    assert found.problems == []
    assert field in [warning.field for warning in found.warnings]


def test_programs_without_confinement_are_warned_of(tmp_path: Path) -> None:
    row = {"prompt": "1+1=", "answer": "2", "test_list": ["assert f() == 2"]}
    code = {"stages.0.rewards.0": {"kind": "code_execution"}, "sandbox.tier": "unsafe"}
    found = report(write_rows(tmp_path / "a.jsonl", row, row, row) | code)
    assert found.problems == []
    (told,) = [warning.message for warning in found.warnings if warning.field == "sandbox.tier"]
    assert "can read and change what the worker can" in told


def test_characters_the_tiny_tokenizer_lacks_are_a_warning(tmp_path: Path) -> None:
    found = report(
        write_rows(tmp_path / "a.jsonl", {"prompt": "WHAT?", "answer": "1"}, {"prompt": "1+1=", "answer": "2"})
    )
    assert any("does not know" in warning.message for warning in found.warnings)


def test_a_demonstration_beyond_the_context_is_a_problem(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "a.jsonl", {"prompt": "1=", "completion": "1+" * 40})["stages.0.data"]
    [problem] = report({"stages.0": {"kind": "sft", "data": data}}).problems
    assert "83 tokens" in problem.message


def test_a_missing_model_does_not_hide_faults_of_the_data(tmp_path: Path) -> None:
    model = {"source": "folder", "path": str(tmp_path / "none")}
    data = {"source": "file", "path": str(tmp_path / "none.jsonl")}
    fields = [problem.field for problem in report({"model": model, "stages.0.data": data}).problems]
    assert fields == ["model.path", "stages.0.data.path"]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "grpo_engine", "preflight", *arguments], cwd=ROOT, capture_output=True, text=True
    )


def test_the_command_prints_json_and_ends_with_2_on_problems(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "group size 1")
    (tmp_path / "c.yaml").write_text(case.config_text(tmp_path))
    done = command(str(tmp_path / "c.yaml"), "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["problems"][0]["field"] == "stages.0.group_size"


def test_prints_of_a_reward_do_not_reach_the_report(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(
        "print('loaded')\ndef f(completions, **k):\n    print('hi')\n    return [0.0] * len(completions)"
    )
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(changed(CUSTOM)))
    done = command(str(tmp_path / "c.yaml"), "--json", "--reward", f"brevity={tmp_path / 'r.py'}")
    assert (done.returncode, json.loads(done.stdout)["problems"]) == (0, [])


def test_the_command_speaks_to_people_too() -> None:
    done = command("configs/demo.yaml")
    assert done.returncode == 0
    assert "ready to run" in done.stdout
    assert re.search(r"memory   about \d.* GB free; in GB: base 0\.60, .*activations \d", done.stdout)


def test_two_ranks_are_checked_and_counted() -> None:
    found = report({"needs.num_ranks": 2})
    assert found.problems == []
    assert found.memory["total_bytes"] == 2 * found.memory["rank_bytes"]


def test_a_whole_check_loads_neither_torch_nor_transformers(tmp_path: Path) -> None:
    code = (
        "import sys; from grpo_engine.preflight import check; from grpo_engine.config_errors import load_config;"
        "print(check(load_config(open('configs/demo.yaml').read()), {}).problems);"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "set()"]
