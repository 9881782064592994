"""Users' own reward functions: what they get and may return, and that their process harms nobody."""

from __future__ import annotations

import hashlib
import time
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_engine.errors import RewardError
from grpo_engine.reward import custom, custom_child
from grpo_engine.reward.custom import Custom, arguments_of
from grpo_engine.reward.custom_child import Unloadable, load_function
from grpo_engine.types import Completion, Prompt, RewardPart
from tests.ended import is_gone, told_before_its_kill
from tests.waiting import wait_until


def batch(texts: list[str], columns: dict[str, Any] | None = None) -> tuple[list[Prompt], list[Completion]]:
    prompts = [Prompt(str(i), i, f"Q{i}", [1], dict(columns or {"answer": str(i)})) for i in range(len(texts))]
    return prompts, [Completion([i] * 3, text, "stop", [0.0] * 3, [0.0] * 3) for i, text in enumerate(texts)]


def answer(source: str, texts: list[str]) -> dict[str, Any]:
    """What the child says of a batch, computed here."""
    function = load_function("mine", source)
    arguments = arguments_of(*batch(texts), custom_child.wanted(function))
    return custom_child.answer(function, "mine", {"arguments": arguments, "count": len(texts), "seed": 7})


def values(source: str, texts: list[str]) -> list[float | None]:
    return [value for value, *_ in answer(source, texts)["values"]]


def test_trl_signature_gets_completions_and_columns() -> None:
    source = "def f(completions, answer, **kwargs):\n    return [float(c == a) for c, a in zip(completions, answer)]"
    assert values(source, ["0", "x"]) == [1.0, 0.0]


def test_prompts_and_token_ids_are_passed() -> None:
    body = "return [len(p) + i[0] for p, i in zip(prompts, completion_ids)]"
    assert values(f"def f(prompts, completion_ids, **columns):\n    {body}", ["a", "b"]) == [2.0, 3.0]


def test_a_function_without_kwargs_gets_only_what_it_names() -> None:
    assert values("def f(completions):\n    return [1] * len(completions)", ["a"]) == [1.0]


@pytest.mark.parametrize(
    ("returned", "kind"),
    [("None", None), ("float('nan')", "NaN"), ("'1'", "str instead of a number"), ("float('inf')", "infinite number"),
     ("[1]", "list instead of a number"), ("{}", "dict instead of a number")],
)  # fmt: skip
def test_a_value_that_is_no_number_abstains_and_all_but_none_is_a_fault(returned: str, kind: str | None) -> None:
    said = answer(f"def f(completions, **k):\n    return [{returned}, 2]", ["a", "b"])["values"]
    assert [(value, fault) for value, _, fault in said] == [(None, kind), (2.0, None)]


@pytest.mark.parametrize(
    ("body", "kind", "word"),
    [("raise ValueError('bad day')", "ValueError in line 2", "bad day"),
     ("return [1]", "wrong number of values", "1 values for 2"), ("return 5", "TypeError", "int"),
     ("raise SystemExit(3)", "SystemExit in line 2", "SystemExit"), ("return None", "TypeError", "NoneType")],
)  # fmt: skip
def test_a_call_that_fails_says_how_and_in_which_line(body: str, kind: str, word: str) -> None:
    said = answer(f"def f(completions, **k):\n    {body}", ["a", "b"])
    assert said["kind"] == kind
    assert word in said["error"]


def test_draws_depend_on_the_batch_alone() -> None:
    source = "import random\ndef f(completions, **k):\n    return [random.random() for _ in completions]"
    assert values(source, ["a", "b"]) == values(source, ["a", "b"])


def test_the_function_named_reward_wins_over_others() -> None:
    source = "def helper(x):\n    return 5\ndef reward(completions, **k):\n    return [helper(c) for c in completions]"
    assert values(source, ["a"]) == [5.0]


def test_imported_and_private_functions_do_not_count() -> None:
    source = "from textwrap import dedent\ndef _h():\n    return 2\ndef f(completions, **k):\n    return [_h()]"
    assert values(source, ["a"]) == [2.0]


@pytest.mark.parametrize(
    ("source", "word"),
    [("def f(:\n  pass", "line 1"), ("x = 1\n\ndef f(completions)\n    return 1", "line 3"), ("x = 1", "found: none"),
     ("def a(c): ...\ndef b(c): ...", "found: a, b"), ("import no_such_module", "no_such_module"),
     ("async def f(completions): ...", "async"), ("raise SystemExit", "SystemExit")],
)  # fmt: skip
def test_sources_that_cannot_be_loaded_say_why(source: str, word: str) -> None:
    with pytest.raises(Unloadable, match=word):
        load_function("mine", source)


def test_draws_of_numpy_depend_on_the_batch_too() -> None:
    source = "import numpy\ndef f(completions, **k):\n    return [numpy.random.random() for _ in completions]"
    assert values(source, ["a", "b"]) == values(source, ["a", "b"])


def test_another_prompt_or_other_tokens_are_another_batch() -> None:
    prompts, completions = batch(["a", "b"])
    batches = [(prompts, completions), (prompts[::-1], completions), (prompts, completions[::-1])]
    assert len({custom._seed(*one) for one in batches}) == 3
    assert custom._seed(*batches[0]) == custom._seed(*batch(["x", "y"]))  # ids tell, texts need not


# ---------------------------------------------------------------- the process
def said(mine: Custom, texts: list[str]) -> list[RewardPart]:
    return mine.score(*batch(texts))


def test_a_process_that_is_late_or_ends_costs_its_batch_and_no_other() -> None:
    moods = {"hang": "time.sleep(600)", "leave": "os._exit(3)", "crash": "os.kill(os.getpid(), 11)"}
    lines = [f"    if completions[0] == {mood!r}: {action}" for mood, action in moods.items()]
    source = "\n".join(["import os, time", "def f(completions):", *lines, "    return [0.5, 0.5]"])
    mine = Custom("mine", 1.0, source, time_limit_s=60)
    mine.time_limit_s = 0.3
    started = time.monotonic()
    [late, _] = said(mine, ["hang", "b"])
    assert time.monotonic() - started < 30
    assert (late.value, mine.take_counts()) == (None, {"reward/late": 2.0})
    mine.time_limit_s = 60.0
    assert [part.value for mood in ("a", "leave", "crash", "a") for part in said(mine, [mood, "b"])] == [
        0.5, 0.5, None, None, None, None, 0.5, 0.5
    ]  # fmt: skip
    assert [fault.message for fault in mine.take_faults()] == [
        "mine took longer than 0.3 s for 2 completions; its process was ended.",
        "mine ended its process (exit status 3).",
    ]
    assert (mine.take_counts(), mine.take_faults()) == ({}, [])
    mine.close()


def test_user_code_prints_and_changes_nothing_here(capfd: pytest.CaptureFixture[str]) -> None:
    columns = {"meta": {"n": 1}}
    source = "print('loaded')\ndef f(completions, meta, **k):\n    meta[0]['n'] = 9\n    print('hi')\n    return [0]"
    mine = Custom("mine", 1.0, source)
    [part] = mine.score(*batch(["a"], columns))
    mine.close()
    assert (part.value, part.version) == (0.0, f"mine@{hashlib.sha256(source.encode()).hexdigest()[:8]}")
    assert columns == {"meta": {"n": 1}}
    assert capfd.readouterr().out == ""


def test_a_source_that_cannot_be_loaded_is_a_reward_error_here() -> None:
    with pytest.raises(RewardError, match="reward 'mine': line 1"):
        Custom("mine", 1.0, "def f(:")


def test_loading_anew_takes_nothing_of_the_batchs_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, deadlines = [0.0], []

    class Loading:
        connection = wanted = None

        def __init__(self, *_: object) -> None:
            now[0] += 100.0

        def end(self, grace_s: float) -> str:
            return ""

    monkeypatch.setattr(custom, "_Child", Loading)
    monkeypatch.setattr(custom, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(custom, "send", lambda connection, request, deadline: deadlines.append(deadline))
    monkeypatch.setattr(custom, "receive", lambda *_: {"values": [[0.5, "", None]]})
    mine = Custom("mine", 1.0, "", time_limit_s=60)
    mine.close()
    assert ([part.value for part in said(mine, ["a"])], deadlines) == ([0.5], [260.0])


def test_what_a_function_started_ends_with_its_process() -> None:
    source = "import subprocess\ndef f(completions):\n    return [subprocess.Popen(['sleep', '600']).pid]"
    mine = Custom("mine", 1.0, source)
    [part] = said(mine, ["a"])
    mine.close()
    assert part.value is not None
    wait_until(lambda: is_gone(int(part.value or 0)), 20, "what it started is gone")


def test_a_function_that_loops_dies_with_the_engine() -> None:
    code = (
        "from tests.unit.test_reward_custom import Custom, said\n"
        "mine = Custom('mine', 1.0, 'def f(completions):\\n    while True: pass')\n"
        "print(mine._child._process.pid, flush=True); said(mine, ['a'])"
    )
    pid = told_before_its_kill(code)
    wait_until(lambda: is_gone(pid), 20, "the child is gone")
