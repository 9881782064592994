"""Turns what went wrong into lines for a person and an exit status."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pydantic import ValidationError
from sqlalchemy.exc import DBAPIError

from app.broker import BrokerFailed
from app.client import ApiProblem, ServerAway
from app.errors import AppError
from app.house_checks import LaunchFailed
from app.launcher import ChildDied
from grpo_engine.errors import EngineError, InvalidConfig, Problem

INVALID = 2
FAILED = 1


class CliError(Exception):
    """A mistake on the command line; the message is a sentence for a person."""


def report(error: Exception) -> int:
    """Print the error and return the exit status."""
    problems: Sequence[Problem] = getattr(error, "problems", ())
    if isinstance(error, InvalidConfig):
        return _show("The config is invalid.", problems, INVALID)
    if isinstance(error, ApiProblem):
        if error.status == 422:
            return _show(f"{error.title}." if problems else error.detail, problems, INVALID)
        return _show(f"{error.title}: {error.detail}", problems, FAILED)
    if isinstance(error, AppError):
        sentence = f"{error.title}." if problems else error.detail
        return _show(sentence, problems, INVALID if error.status == 422 else FAILED)
    if isinstance(error, ValidationError) and error.title == "Settings":
        lines = [_setting(str(e["loc"][0]) if e["loc"] else "", str(e["msg"])) for e in error.errors()]
        return _show("\n".join(lines), (), FAILED)
    if isinstance(error, DBAPIError):
        return _show(f"The database refused: {str(error.orig).strip()}", (), FAILED)
    if isinstance(error, OSError) and error.filename is not None:
        return _show(f"Cannot use {error.filename}: {error.strerror}.", (), FAILED)
    if isinstance(error, CliError | LaunchFailed | ChildDied | ServerAway | BrokerFailed | EngineError):
        return _show(str(error), (), FAILED)
    fault = f"{type(error).__name__}: {error}"
    return _show(f"This is a fault of Cohort: {fault}. COHORT_DEBUG=1 shows where it happened.", (), FAILED)


def problem_lines(problems: Sequence[Problem]) -> str:
    """Three lines a problem: field and value, what is wrong, what to do."""
    return "\n".join(
        f"  {problem.field or 'config'}{f' = {problem.value}' if problem.value else ''}\n"
        f"      {problem.message}\n"
        f"      → {problem.remedy}"
        for problem in problems
    )


def _setting(field: str, message: str) -> str:
    message = message.removeprefix("Value error, ")
    return f"COHORT_{field.upper()}: {message}" if field else message


def _show(sentence: str, problems: Sequence[Problem], status: int) -> int:
    print(sentence, file=sys.stderr)
    if problems:
        print(problem_lines(problems), file=sys.stderr)
    return status
