"""Instruction following: every kind of constraint, wrong columns, shares, and texts made to take long."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_engine.config_rewards import InstructionFollowingReward
from grpo_engine.reward.constraints import Constraint
from grpo_engine.reward.instruction_following import constraint_problem, metric
from grpo_engine.reward.metric import Judgement
from tests.reward_cases import cases_of, completion, prompt

CASES = cases_of("instruction_following")
KINDS = {kind for cls in get_args(Constraint) for kind in get_args(cls.model_fields["kind"].annotation)}


def judged(text: str, constraints: Any, **config: Any) -> Judgement:
    return metric(InstructionFollowingReward(**config)).judge(prompt(constraints=constraints), completion(text))


@pytest.mark.parametrize("case", CASES)
def test_a_constraint_is_kept_or_broken(case: dict[str, Any]) -> None:
    for key, value in (("kept", 1), ("broken", 0), ("unjudged", None)):
        for text in case.get(key, []):
            said = judged(text, [case["constraint"]], extract="whole")
            assert said.value == value, (text, said)
            assert case["constraint"]["kind"] in said.explanation or value == 1


def test_every_kind_has_a_case() -> None:
    assert {case.values[0]["constraint"]["kind"] for case in CASES} == KINDS
    assert len(KINDS) >= 20


def test_the_share_of_kept_constraints_or_all_of_them() -> None:
    wanted = [{"kind": "word_count", "at_most": 3}, {"kind": "json"}, {"kind": "starts_with", "phrase": "Sev"},
              {"kind": "letter_case", "case": "upper"}]  # fmt: skip
    said = judged("<think>long thoughts about it</think>Seven", wanted)
    assert (said.value, said.span) == (0.5, (37, 42))
    assert said.explanation.startswith("2 of 4 constraints are kept. Not kept: json (no JSON: ")
    assert judged("Seven", wanted, credit="all").value == 0
    assert judged("Seven", wanted[::2], credit="all").value == 1


def test_without_constraints_it_abstains_and_without_an_answer_nothing_is_kept() -> None:
    assert judged("Seven", None).value is None
    assert judged("Seven", []).value is None
    assert judged("<think>Seven", [{"kind": "json"}]).value == 0


def test_a_column_of_text_and_one_filled_with_nulls_are_read() -> None:
    assert judged("Seven", '[{"kind": "word_count", "at_most": 3}]').value == 1
    assert judged("Seven", [{"kind": "json", "at_most": None, "words": None}]).value == 0


@pytest.mark.parametrize(
    ("column", "problem"),
    [
        ("no JSON", "it is no JSON"),
        ({"kind": "json"}, "valid list"),
        ([{"kind": "rhymes"}], "'rhymes'"),
        ([{"kind": "json"}, {"kind": "word_count"}], "give at_least, at_most or both"),
        ([{"kind": "word_count", "at_least": 5, "at_most": 4}], "at_least 5 must not exceed at_most 4"),
        ([{"kind": "word_count", "at_most": 4, "unit": 1}], "unit"),
        ([{"kind": "keywords", "words": []}], "words"),
        ([{"kind": "language", "language": "qq"}], "'qq'"),
        ([{"kind": "json_schema", "schema": {"type": "objekt"}}], "the schema is wrong"),
        ([{"kind": "json_schema", "schema": {"type": "string", "pattern": "(a+)+$"}}], "'pattern' is not supported"),
        ([{"kind": "json_schema", "schema": {"$ref": "http://example.org/a"}}], "only references such as"),
        ([{"kind": "json_schema", "schema": {"$ref": "#/$defs/a"}}], "which it does not have"),
        ([{"kind": "json_schema", "schema": {"items": {"$ref": "#"}}}], "recursive"),
        ([{"kind": "json"}] * 51, "at most 50"),
    ],
)
def test_a_wrong_column_is_told_in_a_sentence_and_abstains(column: Any, problem: str) -> None:
    told = constraint_problem({"constraints": column})
    assert told is not None
    assert problem in told
    said = judged("Seven", column)
    assert (said.value, said.explanation) == (None, told)


def test_a_right_column_and_none_at_all_are_no_problem() -> None:
    assert constraint_problem({}) is None
    assert constraint_problem({"constraints": [case.values[0]["constraint"] for case in CASES]}) is None


@given(st.text('ab, .\n#-*[]{}"1é中\u200b', max_size=80))
@settings(max_examples=25)
def test_any_text_is_judged_within_0_and_1(text: str) -> None:
    said = judged(text, [case.values[0]["constraint"] for case in CASES], extract="whole")
    assert said.value is not None
    assert 0 <= said.value <= 1
