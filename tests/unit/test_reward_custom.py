"""Users' own reward functions."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from grpo_engine.errors import RewardError
from grpo_engine.reward.custom import Custom, load_function
from grpo_engine.types import Completion, Prompt


def score(source: str, texts: list[str], columns: dict[str, Any] | None = None) -> list[tuple[float | None, str]]:
    prompts = [Prompt(str(i), i, f"Q{i}", [1], dict(columns or {"answer": str(i)})) for i in range(len(texts))]
    completions = [Completion([i] * 3, text, "stop", [0.0] * 3, [0.0] * 3) for i, text in enumerate(texts)]
    return [(part.value, part.explanation) for part in Custom("mine", 1.0, source).score(prompts, completions)]


def test_trl_signature_gets_completions_and_columns() -> None:
    source = "def f(completions, answer, **kwargs):\n    return [float(c == a) for c, a in zip(completions, answer)]"
    assert [value for value, _ in score(source, ["0", "x"])] == [1.0, 0.0]


def test_prompts_and_token_ids_are_passed() -> None:
    body = "return [len(p) + i[0] for p, i in zip(prompts, completion_ids)]"
    source = f"def f(prompts, completion_ids, **columns):\n    {body}"
    assert [value for value, _ in score(source, ["a", "b"])] == [2.0, 3.0]


def test_a_function_without_kwargs_gets_only_what_it_names() -> None:
    assert score("def f(completions):\n    return [1] * len(completions)", ["a"])[0][0] == 1.0


def test_none_and_nan_abstain() -> None:
    values = score("def f(completions, **k):\n    return [None, float('nan'), 2]", ["a", "b", "c"])
    assert [value for value, _ in values] == [None, None, 2.0]


@pytest.mark.parametrize(
    ("body", "word"),
    [("raise ValueError('bad day')", "bad day"), ("return [1]", "1 values for 2"), ("return 5", "TypeError"),
     ("raise SystemExit(3)", "SystemExit"), ("return ['1', '0']", "text"), ("return [float('inf')] * 2", "infinite"),
     ("return [[1], {}]", "number"), ("return None", "TypeError")],
)  # fmt: skip
def test_broken_functions_abstain_with_the_error(body: str, word: str) -> None:
    for value, explanation in score(f"def f(completions, **k):\n    {body}", ["a", "b"]):
        assert value is None
        assert word in explanation


def test_the_error_names_the_line_of_the_users_source() -> None:
    [(_, explanation)] = score("import math\ndef f(completions, **k):\n    return [math.log(0)]", ["a"])
    assert "(line 3)" in explanation


def test_user_code_cannot_change_the_record() -> None:
    columns = {"meta": {"n": 1}}
    source = "def f(completions, meta, **k):\n    meta[0]['n'] = 9\n    return [0]"
    prompt = Prompt("p", 0, "Q", [1], columns)
    Custom("mine", 1.0, source).score([prompt], [Completion([1], "a", "stop", [0.0], [0.0])])
    assert columns == {"meta": {"n": 1}}


def test_the_function_named_reward_wins_over_others() -> None:
    source = "def helper(x):\n    return 5\ndef reward(completions, **k):\n    return [helper(c) for c in completions]"
    assert score(source, ["a"])[0][0] == 5.0


def test_imported_and_private_functions_do_not_count() -> None:
    source = "from textwrap import dedent\ndef _h():\n    return 2\ndef f(completions, **k):\n    return [_h()]"
    assert score(source, ["a"])[0][0] == 2.0


@pytest.mark.parametrize(
    ("source", "word"),
    [("def f(:\n  pass", "line 1"), ("x = 1\n\ndef f(completions)\n    return 1", "line 3"), ("x = 1", "found: none"),
     ("def a(c): ...\ndef b(c): ...", "found: a, b"), ("import no_such_module", "no_such_module"),
     ("async def f(completions): ...", "async"), ("raise SystemExit", "SystemExit")],
)  # fmt: skip
def test_sources_that_cannot_be_loaded_are_reward_errors(source: str, word: str) -> None:
    with pytest.raises(RewardError, match=word):
        load_function("mine", source)


def test_the_version_is_the_hash_of_the_source() -> None:
    source = "def f(completions, **k):\n    return [0]"
    assert Custom("mine", 1.0, source).version == f"mine@{hashlib.sha256(source.encode()).hexdigest()[:8]}"
