"""What counts as the answer, and where it stands."""

from __future__ import annotations

import pytest

from grpo_engine.reward.extraction import Method, extract, stated

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
    ("boxed", r"<think>\boxed{3}</think>four", None),
    ("boxed", r"<think>\boxed{3}", None),
    ("boxed", r"<think>\boxed{3}</think>\boxed{4}", "4"),
    ("tag", "<answer>3</answer><answer> 4 </answer>!", "4"),
    ("tag", "<think><answer>3</answer></think>4", None),
    ("tag", "<answer>3", None),
    ("tag", "3</answer>", None),
    ("tag", "<answer> </answer>", None),
    ("last_number", "<think>3</think>four", None),
    ("last_number", "<think>3</think>4", "4"),
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


def test_a_tag_of_another_name_is_found() -> None:
    assert extract("tag", "<answer>3</answer><final>4</final>", tag="final").text == "4"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 18. It is more than 17.", "18"),
        ("**Final Answer:** 18", "18"),
        ("Answer: 17\nAnswer: 18", "18"),
        ("so \\boxed{18}, and the answer is 17", "18"),
        ("the answer is that there is none", "that there is none"),
        ("18", "18"),
    ],
)
def test_prose_states_its_answer(text: str, answer: str) -> None:
    found = stated(extract("whole", text))
    assert found.text == answer
    assert found.span is not None
    assert text[found.span[0] : found.span[1]] == answer


def test_only_the_end_of_an_endless_answer_is_searched() -> None:
    found = extract("boxed", "\\boxed{1}" + "x" * 200_000)
    assert found.reason == "There is no complete \\boxed{} in the last 100,000 characters"
    found = extract("boxed", "x" * 200_000 + "\\boxed{1}")
    assert found.span == (200_007, 200_008)


def test_a_number_without_end_is_no_answer() -> None:
    assert extract("last_number", "1" * 40_000).reason == "The last number is longer than 4,000 characters"


@pytest.mark.parametrize("text", ["\\boxed{" * 200_000, "1," * 500_000, "-" * 1_000_000, "111," * 250_000 + "1111"])
@pytest.mark.timeout(20)
def test_a_megabyte_is_read_at_once(text: str) -> None:
    assert extract("boxed", text).text is None
    extract("last_number", text)
    extract("tag", text)
