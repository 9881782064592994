"""Read a prompt's columns: which tests, or which inputs and outputs, its programs must pass. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from grpo_engine.errors import RewardError
from grpo_engine.reward.program_tests import CallCases, assert_tests, check_tests

Wanted = Literal["auto", "check", "asserts", "stdin"]
_TOLD_BY = {"check": "test", "asserts": "test_list", "stdin": "inputs"}


@dataclass(frozen=True, slots=True)
class StreamCases:
    """What the program reads and what it must print."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


Cases = CallCases | StreamCases


def read_cases(columns: Mapping[str, Any], wanted: Wanted = "auto", *, first_failure_ends: bool = True) -> Cases:
    """The cases of one prompt.

    check    `test` (a module with check(candidate)) and `entry_point`; `prompt`, when it is code, gives imports and
             helpers to program and tests, as in HumanEval.
    asserts  `test_list` (statements); `test_setup_code` (text) and `test_imports` (list) run before them, as in MBPP.
    stdin    `inputs` and `outputs`, lists of texts.

    Raises RewardError with the reason when the columns do not hold them: a fault of the dataset, not of the program.
    """
    try:
        return _read(columns, _kind(columns) if wanted == "auto" else wanted, first_failure_ends)
    except RecursionError as error:
        raise RewardError("the tests are nested too deeply") from error


def _read(columns: Mapping[str, Any], kind: Literal["check", "asserts", "stdin"], first_failure_ends: bool) -> Cases:
    if kind == "check":
        test, entry_point = _text(columns, "test"), _text(columns, "entry_point")
        prompt = columns.get("prompt")
        opening = prompt if isinstance(prompt, str) else ""
        return check_tests(test, entry_point, opening, first_failure_ends=first_failure_ends)
    if kind == "asserts":
        setup = [*_texts(columns, "test_imports", ()), columns.get("test_setup_code") or ""]
        return assert_tests(
            _texts(columns, "test_list"), "\n".join(map(str, setup)), first_failure_ends=first_failure_ends
        )
    inputs, outputs = _texts(columns, "inputs"), _texts(columns, "outputs")
    if len(inputs) != len(outputs):
        raise RewardError(f"column inputs has {len(inputs)} texts and outputs {len(outputs)}; they must be as many")
    return StreamCases(inputs, outputs)


def cases_problem(columns: Mapping[str, Any], wanted: Wanted = "auto") -> str | None:
    """For preflight: why a prompt cannot be judged, as a sentence without full stop; None when it can."""
    try:
        read_cases(columns, wanted)
    except RewardError as error:
        return str(error)
    return None


def _kind(columns: Mapping[str, Any]) -> Literal["check", "asserts", "stdin"]:
    for kind in ("check", "asserts", "stdin"):
        if columns.get(_TOLD_BY[kind]) is not None:
            return kind
    raise RewardError("the prompt has no tests; it needs test and entry_point, or test_list, or inputs and outputs")


def _text(columns: Mapping[str, Any], name: str) -> str:
    value = columns.get(name)
    if not isinstance(value, str) or not value.strip():
        raise RewardError(f"column {name} is {_described(value)}; it must be a text")
    return value


def _texts(columns: Mapping[str, Any], name: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
    value = columns.get(name)
    if not value and default is not None:
        return default
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise RewardError(f"column {name} is {_described(value)}; it must be a list of texts")
    return tuple(value)


def _described(value: object) -> str:
    if value is None:
        return "missing"
    return "empty" if not value else f"a {type(value).__name__}"
