"""A megabyte of anything ends soon, in step validity and in logical consistency."""

from __future__ import annotations

import pytest

from grpo_engine.reward import logical_consistency, step_validity

# What is repeated, and what stands behind it: within the characters that are read, and up to a megabyte.
REPEATED = [
    ("9", " + 1 = 2"), ("=", ""), ("1+", "1 = 2"), ("1 = ", "1"), ("\0", "1 = 1"), ("(", "1 = 1"), (")", "1 = 1"),
    ("\\frac{", "1 = 1"), ("<<", "1 = 1"), ("<<1=", ">>"), ("1,000", " = 1"), ("1,000,", " = 1"), ("x^", "2 = 1"),
    ("- ", "1 = 1"), ("!", " = 1"), ("\u202e12*7=84 ", ""), ("√", "4 = 2"), ("\n= 1", ""), ("is 3 ", "= 2"),
    ("(x+1)^8 = 1\n", ""), ("(x+y+z)^8 = 1\n", ""), ("9^9^9^9 = 1\n", ""), ("1/3+", "1 = 2"), ("9^999+", "1 = 2"),
    ("1 a b c d e f g h ", "= 2"), ("x = 1, ", ""), ("answer is ", ""), ("\\boxed{", ""), ("#", " 1"), ("#### ", "1"),
    ("7 is not even ", ""), ("1", ""), ("a=", ""), ("x = ", ""), ("answer to ", ""), ("**", ""), ("so 1. ", ""),
    ("$", ""), ("7 is even. Wait. 7 is odd. ", ""), ("1 1/2 ", "= 2"), ("½", " = 2"), ("answer is \\text{", "4"),
    ("about ", "= 2"), ("to 1 ", "= 2"), ("2(", "= 2"), ("half of ", "2 = 2"), ("\\\\", "= 2"),
    ("1 - 1 = 1 - 1 ", ""), (" is 3 the ", "= 2"),
]  # fmt: skip
NUMBERED = [
    "".join(f"x_{n} = {n % 3}, " for n in range(80_000)),
    " ".join(map(str, range(150_000))) + " = 3\n#### 5.5",
    "\n".join(f"{n}x = {n * n}" for n in range(60_000)),
]
REPETITIVE = [(unit * 99_000)[:99_000] + tail + unit * (900_000 // len(unit) + 2) + tail for unit, tail in REPEATED]
HOSTILE = REPETITIVE + NUMBERED


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text[:10]))
def test_a_megabyte_of_anything_ends(text: str) -> None:
    steps, consistency = step_validity.judge_text(text), logical_consistency.judge_text(text)
    assert steps.value is None or 0 <= steps.value <= 1
    assert consistency.value in (None, 0, 1)
    assert f"first {step_validity.MAX_CHARACTERS:,} characters" in steps.explanation
    assert f"last {logical_consistency.MAX_CHARACTERS:,} characters" in consistency.explanation
