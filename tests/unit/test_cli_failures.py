"""What a person reads when something is wrong, and the exit status."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from app.cli.failures import CliError, report
from app.client import ApiProblem
from app.errors import Conflict, Invalid
from app.settings import Settings
from grpo_engine.errors import InvalidConfig, Problem

GROUP_OF_ONE = Problem("stages.0.group_size", "1", "must be at least 2", "use 2 or more completions a prompt")


@pytest.mark.parametrize(
    "error",
    [InvalidConfig([GROUP_OF_ONE]), ApiProblem(422, "Invalid input", "…", [GROUP_OF_ONE]), Invalid.of([GROUP_OF_ONE])],
)
def test_an_invalid_config_shows_field_value_and_remedy_and_ends_with_2(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(error) == 2
    shown = capsys.readouterr().err
    for part in ("stages.0.group_size = 1", "must be at least 2", "use 2 or more completions a prompt"):
        assert part in shown


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (CliError("There is no user x."), "There is no user x."),
        (Conflict("Run 3 is completed."), "Run 3 is completed."),
        (ApiProblem(409, "Not in this state", "Run 3 is completed."), "Not in this state: Run 3 is completed."),
        (PermissionError(13, "Permission denied", "/etc/x"), "Cannot use /etc/x: Permission denied."),
    ],
)
def test_a_failure_is_one_sentence_and_ends_with_1(
    error: Exception, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(error) == 1
    assert capsys.readouterr().err == f"{sentence}\n"


def test_a_wrong_setting_is_named_by_its_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValidationError) as caught:
        Settings(port=70000)
    assert report(caught.value) == 1
    assert capsys.readouterr().err.startswith("COHORT_PORT: ")


def test_a_fault_of_ours_says_so_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(KeyError("oops")) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("This is a fault of Cohort: KeyError: 'oops'.")
    assert "Traceback" not in shown
