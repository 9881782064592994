"""What a judge is asked, and which replies count."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_engine.reward.learned.judge_messages import MAX_ANSWER, NoVerdict, messages, verdict
from tests.reward_cases import cases_of


@pytest.mark.parametrize("case", cases_of("judge_replies"))
def test_only_one_object_with_a_score_in_range_and_a_reason_is_a_verdict(case: dict[str, Any]) -> None:
    if "value" in case:
        assert verdict(case["reply"]).value == case["value"]
    else:
        with pytest.raises(NoVerdict, match=case["says"]):
            verdict(case["reply"])


@pytest.mark.parametrize("reply", ["[" * 100_000, '{"score": ' + "9" * 5000 + ', "reason": "x"}'])
def test_replies_that_break_parsers_are_no_verdicts(reply: str) -> None:
    with pytest.raises(NoVerdict, match="not one JSON object"):
        verdict(reply)


@settings(max_examples=40)
@given(st.text(alphabet=st.characters(exclude_categories=[])))
def test_whatever_an_answer_holds_stays_inside_its_quotation(text: str) -> None:
    _, user = messages("Grade it.", "2+2?", text, None)
    quoted = json.loads(user["content"])
    assert set(quoted) == {"question", "answer"}
    assert quoted["answer"] == text.encode("utf-8", "replace").decode()


def test_a_reference_answer_is_quoted_beside_the_answer() -> None:
    _, user = messages("Grade it.", "2+2?", "5", "4")
    assert json.loads(user["content"])["reference_answer"] == "4"


def test_of_a_very_long_answer_both_ends_are_sent() -> None:
    _, user = messages("Grade it.", "q", "a" * MAX_ANSWER + "b" * MAX_ANSWER, None)
    sent = json.loads(user["content"])["answer"]
    assert (sent[0], sent[-1]) == ("a", "b")
    assert f"{MAX_ANSWER} characters left out" in sent
    assert len(sent) < MAX_ANSWER + 100
