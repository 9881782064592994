"""Every config that the schema refuses names field, value and remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from grpo_engine.config import RunConfig
from grpo_engine.config_errors import MAX_CHARACTERS, load_config, problems_of
from grpo_engine.errors import InvalidConfig, Problem
from tests.invalid_configs import BASE, CASES, SCHEMA, Invalid, changed


def problems(given: str | dict[str, Any]) -> list[Problem]:
    with pytest.raises(InvalidConfig) as caught:
        load_config(given)
    return caught.value.problems


def test_there_are_at_least_thirty_invalid_configs_and_the_base_is_valid() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 30
    assert load_config(BASE).name == "a run"


@pytest.mark.parametrize("case", SCHEMA, ids=lambda case: case.name)
def test_an_invalid_config_names_field_value_and_remedy(case: Invalid, tmp_path: Path) -> None:
    [problem] = problems(case.config_text(tmp_path))
    assert problem.field == case.field
    assert case.word in problem.message
    assert problem.remedy
    assert len(problem.value) <= 200


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"stages.0.group_size": 1}, "1"),
        ({"stages.0.loss": {"kind": "clip", "clip_low": float("nan")}}, "NaN"),
        ({"name": None}, "null"),
        ({"name": "x" * 999}, "x" * 199 + "…"),
        ({"model": {"source": "folder"}}, "(missing)"),
        ({"stages.0.sampling.temperature": 0}, "0"),
        ({"model.num_heads": 3}, "128 (default)"),
        ({"seed": 10**5000}, "a number too long to show"),
        ({"tags": {"a": 1}}, '{"a": 1}'),
    ],
)
def test_the_offending_value_is_shown(changes: dict[str, Any], value: str) -> None:
    assert problems(changed(changes))[0].value == value


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"stages.0.group_sise": 4}, "did you mean group_size?"),
        ({"stages.0.temperature": 4}, "did you mean sampling.temperature?"),
        ({"stages.0.learning_rate": 1}, "did you mean optimizer.learning_rate?"),
        ({"stages.0.rewards.0.kind": "formt"}, "did you mean format?"),
        ({"stages.0.rewards.0.kind": "formt"}, "use one of accuracy, format, length, code_execution"),
        ({"model": {}}, "folder, tiny_llama"),
        ({"stages.0.group_size": 1}, "the default is 16"),
        ({"nonsense": 1}, "allowed: adapter, deterministic, dtype"),
        ({"stages.0.gae_lambda": 0.9}, "did you mean advantage.gae_lambda?"),
        ({"stages.0.dual_clip": 3}, "did you mean loss.dual_clip?"),
        ({"stages.0.clip_high": 0.28}, "write loss: {kind: clip, clip_high: 0.28}"),
        ({"stages.0.clip_low": 0.1}, "write loss: {kind: clip, clip_low: 0.1}"),
        ({"stages.0.normalize_std": False}, "write advantage: {kind: dr_grpo}"),
        ({"stages.0.normalize_std": True}, "write advantage: {kind: grpo}"),
        ({"stages.0.kl_weight": 0.001}, "write kl: {weight: 0.001}"),
        ({"stages.0.track_kl": False}, "write kl: {track: false}"),
        ({"stages.0.max_micro_batch_rows": 8}, "write memory: {max_micro_batch_tokens: 8192}"),
    ],
)
def test_the_remedy_says_what_would_do(changes: dict[str, Any], remedy: str) -> None:
    assert remedy in problems(changed(changes))[0].remedy


def test_every_fault_is_listed_not_only_the_first() -> None:
    found = problems(changed({"stages.0.group_size": 1, "stages.0.num_steps": 0, "colour": "red", "seed": -1}))
    assert {problem.field for problem in found} == {"stages.0.group_size", "stages.0.num_steps", "colour", "seed"}


def test_paths_hold_no_union_tags_even_deep_inside() -> None:
    data = changed({"stages.0.data": {"source": "file", "path": "", "held_out_rows": -1}})
    assert [problem.field for problem in problems(data)] == ["stages.0.data.path", "stages.0.data.held_out_rows"]


def test_problems_of_serves_errors_from_elsewhere() -> None:
    data = changed({"stages.0.group_size": 1})
    with pytest.raises(ValidationError) as caught:
        RunConfig.model_validate(data)
    [problem] = problems_of(caught.value, data)
    assert str(problem) == "stages.0.group_size = 1: must be at least 2; use 2 or more; the default is 16"


@pytest.mark.parametrize(
    "text",
    ["a: [*nobody]", "a: &a [*a]", "x: " + "[" * 1100, "seed: " + "9" * 6000, "a: 2026-99-99",
     "a: !!python/name:os.system x", "\t- a", "a: b: c", "{a: 1, a: 2}", "a: \x00", "x" * (MAX_CHARACTERS + 1)],
)  # fmt: skip
def test_hostile_yaml_is_a_problem_not_a_crash(text: str) -> None:
    [problem] = problems(text)
    assert problem.remedy


def test_aliases_that_multiply_are_refused() -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    [problem] = problems("\n".join(lines))
    assert "values" in problem.message


def test_a_key_given_twice_names_both_lines() -> None:
    [problem] = problems("name: a\nmodel:\n  source: folder\n  source: tiny_llama\n")
    assert "line 4" in problem.message
    assert "line 3" in problem.message


def test_anchors_and_merge_keys_work() -> None:
    text = """
name: merged
model: {source: tiny_llama}
stages:
  - &first {kind: rl, data: {source: addition}, rewards: [{kind: accuracy}], num_steps: 5}
  - {<<: *first, num_steps: 7}
"""
    assert load_config(text).total_steps() == 12


def test_scientific_numbers_without_a_dot_are_numbers() -> None:
    stage = "{kind: sft, data: {source: addition}, optimizer: {learning_rate: 3e-6}}"
    config = load_config(f"name: a\nmodel: {{source: tiny_llama}}\nstages: [{stage}]")
    assert config.stages[0].optimizer.learning_rate == 3e-6
