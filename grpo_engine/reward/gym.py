"""Gym: the scorer that the package reasoning-gym ships with each of its tasks.

A scorer may hang on what a model wrote, so it runs in a process that can be killed. Some call `eval` or sympy's
parse_expr on the answer, which execute any Python: those see an answer only when there is nothing in it to execute.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from importlib import metadata
from typing import Any, Literal

from grpo_engine.config_rewards import GymReward
from grpo_engine.errors import RewardError
from grpo_engine.reward import extraction
from grpo_engine.reward.accuracy import shorten
from grpo_engine.reward.extraction import Extraction
from grpo_engine.reward.metric import Judgement, Metric
from grpo_engine.reward.versions import module_source, version_of
from grpo_engine.types import Completion, Prompt

Scorer = Callable[[str | None, dict[str, Any]], float]

EVALUATED: dict[str, Literal["literal", "formula"]] = {
    "binary_matrix": "literal", "n_queens": "literal", "spiral_matrix": "literal", "string_insertion": "literal",
    "countdown": "formula", "intermediate_integration": "formula", "polynomial_multiplication": "formula",
    "puzzle24": "formula", "simple_integration": "formula",
}  # fmt: skip
"""Tasks whose scorers execute the answer: a Python literal with eval, or a formula with sympy's parse_expr."""
MAX_EVALUATED = 10_000
"""Characters of an answer that is evaluated."""
_SIGNS = re.compile(r"[0-9A-Za-z\s.+\-*/^(),!=]*")
_WORD = re.compile(r"[A-Za-z]+")
_ATTRIBUTE = re.compile(r"\.\s*[A-Za-z]")
_FUNCTIONS = frozenset([
    "sqrt", "cbrt", "exp", "log", "ln", "abs", "Abs", "sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan",
    "asec", "acsc", "acot", "sinh", "cosh", "tanh", "sech", "csch", "coth", "asinh", "acosh", "atanh", "pi", "oo",
])  # fmt: skip


def metric(config: GymReward, task: str, options: Mapping[str, Any]) -> Metric:
    """`task`'s own score_answer(answer, entry); the entry is the prompt's columns question, answer and metadata.

    A scorer that raises, is late, or gives no number from 0 to 1 makes that completion abstain. `metric` itself does
    not import the package: that is done by `prepare`, which raises RewardError for a task that it does not know.
    """
    told = json.dumps(options)
    return Metric(
        config.kind,
        config.weight,
        _version(),
        partial(_judge, config, task, lambda: load_scorer(task, told)),
        slow=True,
        quick=partial(_judge_quickly, config, task),
        prepare=lambda: load_scorer(task, told),
        given={"task": task, "options": dict(options)},
    )


def _version() -> str:
    package = metadata.version("reasoning-gym").encode()
    return version_of("gym", module_source(__file__, extraction.__file__), package)


def _judge_quickly(config: GymReward, task: str, prompt: Prompt, completion: Completion) -> Judgement | None:
    """Of an answer that the scorer does not see; None for any other."""
    found = _find(config, prompt, completion)
    if found.text is None:
        return Judgement(0.0, f"{found.reason}, so there is no answer.")
    gold = prompt.columns.get("answer")
    if task not in EVALUATED or found.text == gold or is_inert(found.text, EVALUATED[task]):
        return None
    wanted = "a plain value" if EVALUATED[task] == "literal" else "a formula"
    said = f"{shorten(found.text)} is not {wanted}; the scorer of {task} would execute it, so it counts as wrong."
    return Judgement(0.0, said, found.span)


def _judge(
    config: GymReward, task: str, scorer: Callable[[], Scorer], prompt: Prompt, completion: Completion
) -> Judgement:
    if quick := _judge_quickly(config, task, prompt, completion):
        return quick
    found = _find(config, prompt, completion)
    assert found.text is not None
    score = scorer()
    try:
        value = float(score(found.text, _entry(prompt)))
    except Exception as error:
        return Judgement(None, f"The scorer of {task} failed: {type(error).__name__}: {error}.", found.span)
    if not 0 <= value <= 1:
        return Judgement(None, f"The scorer of {task} gave {value}, which is no value from 0 to 1.", found.span)
    return Judgement(value, f"{task} scores {shorten(found.text)} with {value:.3g}.", found.span)


def _find(config: GymReward, prompt: Prompt, completion: Completion) -> Extraction:
    opened = extraction.opens_thinking(prompt.text)
    return extraction.extract(config.extract, completion.text, thinking_opened=opened)


def is_inert(answer: str, kind: Literal["literal", "formula"]) -> bool:
    """Whether evaluating `answer` executes nothing.

    literal: it is a Python literal, or no Python at all. formula: numbers, operators, brackets, names of one letter and
    mathematical functions.
    """
    if len(answer) > MAX_EVALUATED:
        return False
    if kind == "formula":
        words = [word for word in _WORD.findall(answer) if len(word) > 1]
        has_only_signs = _SIGNS.fullmatch(answer) is not None and _ATTRIBUTE.search(answer) is None
        return has_only_signs and _FUNCTIONS.issuperset(words)
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError):
        return True
    except (RecursionError, MemoryError):
        return False
    try:
        ast.literal_eval(tree)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return False
    return True


def _entry(prompt: Prompt) -> dict[str, Any]:
    columns = prompt.columns
    return {
        "question": columns.get("question", prompt.text),
        "answer": columns.get("answer"),
        "metadata": columns.get("metadata", {}),
    }


@lru_cache(maxsize=8)
def load_scorer(task: str, options: str) -> Scorer:
    """The task's scorer under its own options, JSON. Raises RewardError when the package does not know the task."""
    import reasoning_gym

    try:
        dataset = reasoning_gym.create_dataset(task, **{**json.loads(options), "size": 1})
    except Exception as error:
        raise RewardError(f"reasoning-gym cannot make the task {task!r} with {options}: {error}") from error
    return dataset.score_answer  # type: ignore[no-any-return]
