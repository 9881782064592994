"""What counts as the answer, and where it stands."""

from __future__ import annotations

import time

import pytest

from grpo_engine.reward.extraction import Method, extract

CASES: list[tuple[Method, str, str | None]] = [
    ("after_think", "<think>1+1=2</think>632", "632"),
    ("after_think", "<think></think> \n 632 \n", "632"),
    ("after_think", "<think>a</think>1<think>b</think>2", "2"),
    ("after_think", "632", "632"),
    ("after_think", "<think>632", None),
    ("after_think", "<think>632</think>  ", None),
    ("after_think", "", None),
    ("boxed", r"so \boxed{42}.", "42"),
    ("boxed", r"\boxed{1} then \boxed{2}", "2"),
    ("boxed", r"\boxed{\frac{1}{\sqrt{2}}} end", r"\frac{1}{\sqrt{2}}"),
    ("boxed", r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    ("boxed", r"\boxed{ 7 }", "7"),
    ("boxed", r"\boxed{7} and \boxed{8", "7"),
    ("boxed", r"\boxed{}", None),
    ("boxed", "boxed{3}", None),
    ("last_number", "from 3 to 12 apples.", "12"),
    ("last_number", "it costs 1,234.50 in all", "1,234.50"),
    ("last_number", "x = -5", "-5"),
    ("last_number", "9-5", "5"),
    ("last_number", "(2)-7", "7"),
    ("last_number", "about 1.5e-3", "1.5e-3"),
    ("last_number", "7,12,1234", "1234"),
    ("last_number", "half is .5", ".5"),
    ("last_number", "it is 632.", "632"),
    ("last_number", "none here", None),
    ("whole", "  <think>x</think> 5\n", "<think>x</think> 5"),
    ("whole", " \n", None),
]


@pytest.mark.parametrize(("method", "text", "answer"), CASES)
def test_extraction_finds_the_answer(method: Method, text: str, answer: str | None) -> None:
    assert extract(method, text).text == answer


@pytest.mark.parametrize(("method", "text", "answer"), [case for case in CASES if case[2] is not None])
def test_the_span_is_the_text_that_was_extracted(method: Method, text: str, answer: str) -> None:
    found = extract(method, text)
    assert found.span is not None
    assert text[found.span[0] : found.span[1]] == answer


@pytest.mark.parametrize(("method", "text"), [(case[0], case[1]) for case in CASES if case[2] is None])
def test_no_answer_comes_with_a_reason(method: Method, text: str) -> None:
    assert len(extract(method, text).reason) > 10


def test_thinking_that_the_prompt_opened_must_be_closed() -> None:
    assert extract("after_think", "632", thinking_opened=True).text is None
    assert extract("after_think", "1+1</think>632", thinking_opened=True).text == "632"


@pytest.mark.parametrize("text", ["\\boxed{" * 5000, "1," * 20000, "-" * 40000, "1" * 40000, "111," * 5000 + "1111"])
def test_hostile_completions_are_read_in_reasonable_time(text: str) -> None:
    started = time.monotonic()
    extract("boxed", text)
    extract("last_number", text)
    assert time.monotonic() - started < 5
