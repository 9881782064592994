"""Code quality: what parses, which names are undefined, what is too complex, and forbidden calls under any name."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_engine.config_rewards import CodeQualityReward
from grpo_engine.reward.code_quality import metric
from grpo_engine.reward.metric import Judgement
from tests.reward_cases import cases_of, completion, prompt


def judged(text: str, *, code_prompt: str | None = None, **config: Any) -> Judgement:
    columns = {} if code_prompt is None else {"prompt": code_prompt}
    return metric(CodeQualityReward(**config)).judge(prompt(**columns), completion(text))


@pytest.mark.parametrize("case", cases_of("code_quality"))
def test_the_quality_of_a_program(case: dict[str, Any]) -> None:
    text = case.get("text") or f"Here it is:\n```python\n{case['code']}\n```\nIt runs."
    config = {"max_complexity": case.get("max_complexity", 10)}
    if "forbidden" in case:
        config["forbidden_calls"] = case["forbidden"]
    said = judged(text, code_prompt=case.get("prompt"), **config)
    assert said.value == pytest.approx(case["value"]), said.explanation
    assert case.get("says", "") in said.explanation


def test_the_span_is_the_program() -> None:
    text = "So:\n```python\nprint(1)\n```\n"
    start, end = judged(text).span or (0, 0)
    assert text[start:end].strip() == "print(1)"


@pytest.mark.parametrize(
    "program",
    ["(" * 50_000, "[" * 900 + "]" * 900, "-" * 40_000 + "1", "a" + ".b" * 20_000, "1" + "+1" * 20_000, "\0" * 40_000,
     "x = 1 if 1 else " * 3_000 + "1", "lambda: " * 5_000 + "1", "if 1:\n" * 2_000, "9" * 40_000, "f'{" * 10_000,
     "not " * 10_000 + "1", "a = " * 10_000 + "1", "\u202e" * 20_000, "x" * 1_000_000],
    ids=lambda program: program[:8],
)  # fmt: skip
@pytest.mark.timeout(20)
def test_a_hostile_program_is_judged_and_never_run(program: str) -> None:
    said = judged(f"```python\n{program}\n```")
    assert said.value is not None
    assert 0 <= said.value <= 1


def test_a_program_of_many_plain_statements_is_judged_whole() -> None:
    program = "\n".join(f"value_{number} = {number} + 1" for number in range(1_000))
    assert judged(f"```python\n{program}\nprint(value_999)\n```").value == 1
    assert judged(f"```python\n{program}\nprint(value_1000)\n```").value == 0.5
