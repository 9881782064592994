r"""Formulas compared by math-verify and sympy. May take long or hang: call it where the process can be killed.

No signal-based timeouts here (they fail outside a main thread and would replace somebody's alarm). What is known to
explode (towers of powers, factorials of large numbers, sums and integrals left to do) is refused by its look before
the libraries see it; the rest is up to whoever holds the clock.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from grpo_engine.reward.answers import Reading, Verdict, differs_in_form
from grpo_engine.reward.answers_numbers import read_number
from grpo_engine.reward.answers_text import is_balanced, normalise

MAX_CHARACTERS = 400
MAX_DEPTH = 25
MAX_POWER = 10_000
MAX_FACTORIAL = 1_000
ROUNDED_DIGITS = 12
"""Decimals in which math-verify compares floats; its own 6 would make 0.333333 a third."""

_UNFINISHED = re.compile(r"\\(?:i*int|oint|sum|prod|lim)(?![a-zA-Z])")
# Only numbers above numbers: 2^{2^n} is harmless.
_TOWER = re.compile(r"\^\s*(?:[{(][^{}()a-zA-Z]*\^\s*[{(]?\s*[-+]?[0-9.]+(?![0-9.]*\s*[a-zA-Z])|[-+]?[0-9.]+\s*\^)")
_POWER = re.compile(r"\^\s*[{(]?\s*[-+]?([0-9]+)")
_FACTORIAL = re.compile(r"([0-9]*)(\)?)\s*!+")
# Plain spellings and their LaTeX.
_FUNCTIONS = re.compile(r"(?<![\\a-zA-Z])(sqrt|sin|cos|tan|log|ln|exp|pi|infty|alpha|beta|theta)(?![a-zA-Z])")
# What may stand between two signs of an expression without changing it.
_GAP = r"(?:[\s{}*$]|\\cdot(?![a-z])|\\times(?![a-z]))"
_ROOT = re.compile(r"\\sqrt\s*\(([^()]*)\)|\\sqrt\s+([0-9a-zA-Z])")


def fault_of(text: str) -> str:
    """Why a formula is not given to the libraries, without full stop; empty when it is. `text`: normalised."""
    if len(text) > MAX_CHARACTERS:
        return f"The formula is longer than {MAX_CHARACTERS} characters"
    if not is_balanced(text):
        return "Its braces do not match"
    if _depth(text) > MAX_DEPTH:
        return f"Its brackets are nested more than {MAX_DEPTH} deep"
    if _TOWER.search(text.replace("**", "^")):
        return "A power of powers is not worked out"
    powers = [len(digits) > 6 or int(digits) > MAX_POWER for digits in _POWER.findall(text.replace("**", "^"))]
    factorials = _FACTORIAL.findall(text)
    if any(powers) or any(len(digits) > 4 or int(digits or 0) > MAX_FACTORIAL for digits, _ in factorials):
        return "A power or factorial is too large to be worked out"
    if len(factorials) > 4 or "!!" in text or re.search(r"[0-9]{200}", text):
        return "It holds too large numbers"
    return ""


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def compare_formulas(answer: Reading, gold: Reading, question: str = "", tolerance: float = 0.0) -> Verdict:
    """Whether two formulas are equal. `question`: the prompt; an answer that only repeats it is none.

    A decimal equals an irrational number only within `tolerance`; 0 = never, for it is rounded."""
    theirs = parse(gold.text)
    if theirs is None and gold.is_formula:
        return Verdict(None, "The gold answer cannot be read as mathematics.")
    if theirs is None:
        return Verdict(False)
    if different := differs_in_form(answer, gold):
        return different
    if fault := fault_of(answer.text):
        return Verdict(False, fault + ".")
    if _UNFINISHED.search(answer.text) and not _UNFINISHED.search(gold.text):
        return Verdict(False, "It is not worked out: a sum, integral or limit is left in it.")
    ours = parse(answer.text)
    if ours is None:
        return Verdict(False, "It cannot be read as mathematics.")
    if answer.number and "." in answer.text and not tolerance and _is_irrational(theirs):
        return Verdict(False, "It is rounded; the gold answer is exact.")
    if not (_verified(theirs, ours) or (tolerance and _is_close(theirs, ours, tolerance))):
        return Verdict(False)
    if question and repeats(answer.text, question):
        return Verdict(False, "It only repeats an expression of the question.")
    return Verdict(True)


def repeats(answer: str, question: str) -> bool:
    """Whether the answer, a formula with an operation left in it, stands in the question in the same signs."""
    signs = re.sub(rf"{_GAP}", "", answer)
    if read_number(answer) or len(signs) < 3 or not re.search(r"[-+*/^!]|\\[a-z]", signs[1:]):
        return False
    pattern = f"{_GAP}*".join(re.escape(sign) for sign in signs)
    return re.search(rf"(?<![0-9a-zA-Z.^]){pattern}(?![0-9a-zA-Z^])", normalise(question[-20_000:])) is not None


def parse(text: str) -> Any | None:
    """The sympy object that math-verify reads in normalised `text`; None when it reads none or something undefined."""
    from math_verify.parser import LatexExtractionConfig
    from math_verify.parser import parse as parse_answer
    from sympy import nan, zoo

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns once that its own timeouts are off
    try:
        found = parse_answer(
            f"${_as_latex(text)}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None
        )
    except (ArithmeticError, RecursionError, MemoryError, ValueError):
        return None
    return None if not found or found[0].has(nan, zoo) else found[0]


def _as_latex(text: str) -> str:
    """Programmers' spelling to LaTeX: x**2, sqrt(3), 2*pi."""
    text = text.replace("**", "^").replace("<=", r"\le ").replace(">=", r"\ge ")
    text = _FUNCTIONS.sub(r"\\\1", text)
    text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2]}}}", text)
    text = re.sub(r"\^\(([^()]*)\)", r"^{\1}", text)
    text = re.sub(r"\^([-+]?[0-9]{2,}|[-+][0-9a-zA-Z])", r"^{\1}", text)
    return text.replace("*", r" \cdot ")


def _verified(gold: Any, answer: Any) -> bool:
    from math_verify import verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    try:
        return bool(
            verify(gold, answer, float_rounding=ROUNDED_DIGITS, timeout_seconds=None, allow_set_relation_comp=True)
        )
    except (ArithmeticError, RecursionError, MemoryError, ValueError, TypeError, AttributeError):
        return False


def _is_irrational(value: Any) -> bool:
    return bool(getattr(value, "is_number", False)) and not getattr(value, "is_rational", False)


def _is_close(gold: Any, answer: Any, tolerance: float) -> bool:
    """Values of two expressions without variables, to 15 digits."""
    if not (getattr(gold, "is_number", False) and getattr(answer, "is_number", False)):
        return False
    try:
        ours, theirs = complex(answer.evalf(15)), complex(gold.evalf(15))
    except (ArithmeticError, TypeError, ValueError):
        return False
    return abs(ours - theirs) <= tolerance * abs(theirs)
