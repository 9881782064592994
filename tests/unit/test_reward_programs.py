"""Which text of a completion is the program."""

from __future__ import annotations

import pytest

from grpo_engine.reward.programs import FoundProgram, ProgramMethod, defines_name, find_program

FENCE = "```"
TWO_BLOCKS = f"First:\n{FENCE}python\ndef f(x):\n    return x\n{FENCE}\nUse:\n{FENCE}python\nprint(f(1))\n{FENCE}\n"

CASES: dict[str, tuple[ProgramMethod, str, str | None]] = {
    "a block": ("code_block", f"So:\n{FENCE}python\nx = 1\n{FENCE}\nDone.", "x = 1\n"),
    "the last of two": ("code_block", TWO_BLOCKS, "print(f(1))\n"),
    "output after the program": ("code_block", f"{FENCE}py\nx = 1\n{FENCE}\n{FENCE}\n1\n{FENCE}", "x = 1\n"),
    "other languages last": ("code_block", f"{FENCE}\nx = 1\n{FENCE}\n{FENCE}bash\npython x.py\n{FENCE}", "x = 1\n"),
    "only another language": ("code_block", f"{FENCE}javascript\nlet x\n{FENCE}", "let x\n"),
    "never closed": ("code_block", f"{FENCE}python\nx = 1\ny = ", "x = 1\ny = "),
    "an empty block is none": ("code_block", f"{FENCE}python\nx = 1\n{FENCE}\n{FENCE}python\n{FENCE}", "x = 1\n"),
    "tildes": ("code_block", "~~~python\ns = '```'\n~~~", "s = '```'\n"),
    "four around three": ("code_block", "````\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
    "a fence with a language closes none": (
        "code_block",
        f"{FENCE}python\ns = '''\n{FENCE}json\n'''\n{FENCE}",
        f"s = '''\n{FENCE}json\n'''\n",
    ),
    "after the last end of the thinking": ("after_think", "<think>a</think>x = 1</think>x = 2", "x = 2"),
    "in a list": ("code_block", f"1. So\n   {FENCE}python\n   if x:\n       y\n   {FENCE}", "if x:\n    y\n"),
    "attributes": ("code_block", f"{FENCE}{{.Python}}\nx = 1\n{FENCE}\n{FENCE}python:a.py\nx = 2\n{FENCE}", "x = 2\n"),
    "windows lines": ("code_block", f"{FENCE}python\r\nx = 1\r\n{FENCE}\r\n", "x = 1\r\n"),
    "inline backticks are no fence": ("code_block", f"{FENCE}x = 1{FENCE}", f"{FENCE}x = 1{FENCE}"),
    "no block": ("code_block", "<think>a</think>\n    return 1\n", "\n    return 1\n"),
    "a block in the thinking": ("code_block", f"<think>\n{FENCE}\nx\n{FENCE}\n</think>y = 2", "y = 2"),
    "a fence right after the thinking": ("code_block", f"<think>a</think>{FENCE}py\nx = 1\n{FENCE}", "x = 1\n"),
    "answer only in thinking": ("code_block", f"<think>\n{FENCE}python\nx = 1\n{FENCE}\n</think>", None),
    "thinking never closed": ("code_block", f"<think>\n{FENCE}python\nx = 1\n{FENCE}\n", None),
    "after the thinking": ("after_think", "<think>a</think>x = 1", "x = 1"),
    "after the thinking, fences stay": ("after_think", f"{FENCE}\nx\n{FENCE}", f"{FENCE}\nx\n{FENCE}"),
    "whole": ("whole", "<think>x = 1", "<think>x = 1"),
    "white space": ("whole", " \n\t ", None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_program_is_the_text_that_the_method_names(name: str) -> None:
    method, completion, expected = CASES[name]
    assert find_program(method, completion).text == expected


def test_without_a_block_that_defines_the_name_the_best_marked_one_is_taken() -> None:
    text = f"{FENCE}python\nx = 1\n{FENCE}\n{FENCE}bash\nls\n{FENCE}"
    assert find_program("code_block", text, defines="f").text == "x = 1\n"


@pytest.mark.parametrize("name", [name for name, (_, _, program) in CASES.items() if program and name != "in a list"])
def test_the_span_is_where_the_program_stands(name: str) -> None:
    method, completion, _ = CASES[name]
    found = find_program(method, completion)
    assert found.span is not None
    assert completion[slice(*found.span)] == found.text


def test_a_block_that_defines_the_wanted_function_goes_before_later_ones() -> None:
    assert find_program("code_block", TWO_BLOCKS, defines="f").text == "def f(x):\n    return x\n"
    assert find_program("code_block", TWO_BLOCKS, defines="g").text == "print(f(1))\n"


def test_thinking_that_the_prompt_opened_must_be_closed() -> None:
    found = find_program("code_block", f"{FENCE}\nx = 1\n{FENCE}", thinking_opened=True)
    assert found == FoundProgram(None, None, "The thinking was never closed with </think>")


def test_a_program_beyond_the_limit_is_none() -> None:
    assert find_program("whole", "x" * 262_145).reason == "The program is longer than 262,144 characters"
    assert find_program("whole", "x" * 262_144).text is not None


@pytest.mark.parametrize("line", ["def f(x):", "async def f():", "class f:", "f = lambda x: x", "f: int = 1"])
def test_definitions_are_seen_at_the_start_of_a_line_only(line: str) -> None:
    assert defines_name(f"import os\n{line}\n", "f")
    assert not defines_name(f"import os\n    {line}\n", "f")
    assert not defines_name(f"import os\n{line}\n", "g")


@pytest.mark.timeout(30)  # quadratic work would take minutes
@pytest.mark.parametrize("unit", ["```\n", "``` \t ", "`", "~~~~x\n", "  ```py\nx\n  ```\n", "<think>", "\x00\u202e"])
def test_hostile_text_of_a_megabyte_is_read_in_linear_time(unit: str) -> None:
    find_program("code_block", unit * (1_000_000 // len(unit)), defines="f")
