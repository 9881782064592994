"""Code execution without a sandbox: what is asked of it, and what its outcomes are worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_engine.config_rewards import CodeExecutionReward
from grpo_engine.reward.code_execution import metric, whole_program
from grpo_engine.reward.program_cases import Cases, StreamCases, read_cases
from grpo_engine.reward.program_tests import CallCases
from grpo_engine.reward.program_verdicts import judge, same_output
from grpo_engine.reward.sandbox.jobs import CheckJob, End, Job, Outcome, ProgramJob, Run
from grpo_engine.types import RewardPart
from tests.reward_cases import completion, prompt

ASSERTS = ["assert f(1) == 2", "assert f(2) == 3"]
RIGHT = "```python\ndef f(x):\n    return x + 1\n```"
Credit = Literal["share", "all"]


class Passing:
    """Says of every job that all its cases pass."""

    def __init__(self) -> None:
        self.batches: list[list[Job]] = []

    def run_all(self, jobs: Sequence[Job]) -> list[Outcome]:
        self.batches.append(list(jobs))
        return [Outcome("finished", reports=((True, "passed"),) * 2, complete=True) for _ in jobs]


def score(texts: Sequence[str], runner: Passing, **columns: Any) -> list[RewardPart]:
    asked = prompt(**columns)
    return metric(CodeExecutionReward(time_limit_s=3), runner).score([asked] * len(texts), list(map(completion, texts)))


def test_a_batch_is_run_at_once_and_equal_programs_once() -> None:
    runner = Passing()
    parts = score([RIGHT, RIGHT.replace("+ 1", "+ 2"), f"Again:\n{RIGHT}", ""], runner, test_list=ASSERTS)
    assert [part.value for part in parts] == [1.0, 1.0, 1.0, 0.0]
    [jobs] = runner.batches
    assert [job.program for job in jobs] == ["def f(x):\n    return x + 1\n", "def f(x):\n    return x + 2\n"]
    assert all(isinstance(job, CheckJob) and job.time_limit_s == 3 for job in jobs)


def test_the_answers_are_in_the_tests_alone() -> None:
    runner = Passing()
    score([RIGHT], runner, test_list=["assert f(1) == 123456789"])
    [[job]] = runner.batches
    assert isinstance(job, CheckJob)
    assert "123456789" in job.tests
    assert "123456789" not in job.program


def test_inputs_go_to_one_job() -> None:
    runner = Passing()
    score(["```\nprint(input())\n```"], runner, inputs=["1", "2"], outputs=["1", "2"])
    assert runner.batches == [[ProgramJob("print(input())\n", ("1", "2"), 3)]]


def test_where_a_share_is_credited_a_failure_does_not_keep_the_other_inputs_back() -> None:
    runner = Passing()
    asked = prompt(inputs=["1", "2"], outputs=["1", "2"])
    config = CodeExecutionReward(credit="share", time_limit_s=3)
    metric(config, runner).score([asked], [completion("```\nprint(input())\n```")])
    assert runner.batches == [[ProgramJob("print(input())\n", ("1", "2"), 3, every_input=True)]]


def test_the_tests_of_a_group_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def read(columns: Mapping[str, Any], *given: Any, **named: Any) -> Cases:
        seen.append(columns)
        return read_cases(columns, *given, **named)

    monkeypatch.setattr("grpo_engine.reward.code_execution.read_cases", read)
    score([RIGHT] * 16, Passing(), test_list=ASSERTS)
    assert len(seen) == 1


def test_a_prompt_without_tests_abstains_and_runs_nothing() -> None:
    runner = Passing()
    [part] = score([RIGHT], runner, answer="2")
    assert part.value is None
    assert part.explanation.startswith("Nothing to test with: the prompt has no tests")
    assert runner.batches == []


def test_the_version_is_that_of_the_code() -> None:
    versions = {metric(CodeExecutionReward(weight=weight), Passing()).version for weight in (0.5, 1.0)}
    assert len(versions) == 1
    assert versions.pop().startswith("code_execution@")


OPENING = 'import math\ndef f(x):\n    """Root."""\n'
OPENED = CallCases("", 1, "f", preamble="import math\n", opening=OPENING)


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("    return math.sqrt(x)\n", f"{OPENING.rstrip()}\n    return math.sqrt(x)\n"),
        ("\n    return x\n", f"{OPENING.rstrip()}\n\n    return x\n"),
        ("def f(x):\n    return x\n", "import math\ndef f(x):\n    return x\n"),
        ("x = 1\n", "import math\nx = 1\n"),
        (
            "from __future__ import annotations\ndef f(x): pass",
            "from __future__ import annotations\nimport math\n\ndef f(x): pass",
        ),
    ],
)
def test_a_program_stands_after_what_the_prompt_gives(text: str, whole: str) -> None:
    assert whole_program(text, OPENED) == whole


def test_a_prompt_that_gives_nothing_changes_nothing() -> None:
    assert whole_program("    x = 1", CallCases("", 1, "f")) == "    x = 1"


# ---------------------------------------------------------------- what an outcome is worth
@pytest.mark.parametrize(
    ("end", "error", "value", "explanation"),
    [
        ("compile_error", "SyntaxError: x (line 1)", 0.0, "Compile error: SyntaxError: x (line 1)."),
        ("exception", "KeyError: 1 (line 2)", 0.0, "Error: KeyError: 1 (line 2)."),
        ("exited", "exit status 0", 0.0, "Early exit: exit status 0."),
        ("time", "not through after 3 s", 0.0, "Time limit: not through after 3 s."),
        ("memory", "MemoryError", 0.0, "Memory limit: MemoryError."),
        ("crashed", "SIGSEGV", 0.0, "Crash: SIGSEGV."),
        ("refused", "no slot", None, "The sandbox could not run it: no slot."),
        ("tests_failed_to_run", "ImportError: x", None, "The tests of this prompt do not run: ImportError: x."),
    ],
)
def test_each_end_is_told_apart(end: End, error: str, value: float | None, explanation: str) -> None:
    assert judge(CallCases("", 2, "f"), Outcome(end, error), "all") == (value, explanation)


@given(
    reports=st.lists(st.booleans(), max_size=12),
    num_cases=st.none() | st.integers(1, 12),
    complete=st.booleans(),
)
def test_values_stay_in_bounds_and_all_needs_everything(
    reports: list[bool], num_cases: int | None, complete: bool
) -> None:
    end: End = "finished" if complete else "exited"
    told = tuple((passed, "passed" if passed else "wrong: it") for passed in reports)
    outcome, cases = Outcome(end, "gone", told, complete), CallCases("", num_cases, "f")
    share, whole = judge(cases, outcome, "share")[0], judge(cases, outcome, "all")[0]
    if share is None or whole is None:
        assert complete
        assert not reports
        return
    assert whole in (0.0, 1.0)
    assert whole <= share <= 1.0
    assert (share == 1.0) == (whole == 1.0) == (complete and all(reports) and len(reports) >= (num_cases or 1))


@pytest.mark.parametrize(("credit", "value"), [("share", 2 / 3), ("all", 0.0)])
def test_a_program_that_ends_before_its_tests_do_has_not_passed(credit: Credit, value: float) -> None:
    outcome = Outcome("exited", "exit status 0", ((True, "passed"),) * 2, complete=False)
    assert judge(CallCases("", 2, "f"), outcome, credit)[0] == value


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(0, 11))
def test_one_more_case_passed_never_lowers_the_share(reports: list[bool], at: int) -> None:
    def share(passed: list[bool]) -> float:
        told = tuple((one, "wrong: it") for one in passed)
        value = judge(CallCases("", len(passed), "f"), Outcome("finished", "", told, complete=True), "share")[0]
        assert value is not None
        return value

    better = [passed or at % len(reports) == index for index, passed in enumerate(reports)]
    assert share(better) >= share(reports)


def test_a_share_of_cases_that_nobody_can_count_or_of_a_missing_name_is_nothing() -> None:
    passed = (True, "passed")
    escaped, missing = Outcome("exited", "exit status 0", (passed,)), (False, "missing: the program does not define g")
    assert judge(CallCases("", None, "f"), escaped, "share")[0] == 0.0
    assert judge(CallCases("", 2, "f"), escaped, "share")[0] == 0.5
    assert judge(CallCases("", 2, "f"), Outcome("finished", "", (passed, missing), complete=True), "share")[0] == 0.0


def streams(*printed: str, end: End = "finished") -> Outcome:
    runs = (*(Run("finished", stdout=text) for text in printed), *([Run(end, "gone")] if end != "finished" else []))
    return Outcome(end, "gone" if end != "finished" else "", complete=end == "finished", runs=runs)


def test_outputs_that_never_came_have_not_passed() -> None:
    cases = StreamCases(("a", "b", "c"), ("1", "2", "3"))
    assert judge(cases, streams("1", "2", "3"), "all") == (1.0, "Passed: 3 cases.")
    said = "Time limit in case 2: gone. 1 of 3 cases passed."
    assert judge(cases, streams("1", end="time"), "share") == (1 / 3, said)
    assert judge(cases, streams("1", end="time"), "all") == (0.0, said)


def test_cut_output_is_not_compared() -> None:
    outcome = Outcome("finished", complete=True, runs=(Run("finished", stdout="1", output_cut=True),))
    said = "Wrong answer in case 1: it printed more than is kept. 0 of 1 cases passed."
    assert judge(StreamCases(("",), ("1",)), outcome, "all") == (0.0, said)


def test_an_output_that_cannot_be_kept_whole_is_a_fault_of_the_data() -> None:
    runs = (Run("finished", stdout="1"), Run("finished", stdout="22", output_cut=True))
    cases = StreamCases(("", ""), ("1", "222"))
    for credit in ("all", "share"):
        value, said = judge(cases, Outcome("finished", complete=True, runs=runs), credit)
        assert value is None
        assert "wanted in case 2 is longer" in said


@given(st.lists(st.text(alphabet="ab1 ", max_size=5), max_size=5), st.sampled_from(["", "\n", "\n\n", " \n"]))
def test_white_space_at_the_ends_of_lines_is_free(lines: list[str], end: str) -> None:
    text = "\n".join(lines)
    assert same_output("\n".join(f"{line} \t" for line in lines) + end, text)
    assert not same_output(text + "x", text)


@pytest.mark.parametrize(
    ("printed", "wanted"), [("1 2", "1  2"), ("1\n\n2", "1\n2"), (" 1", "1"), ("1", "1.0"), ("", "1")]
)
def test_other_differences_count(printed: str, wanted: str) -> None:
    assert not same_output(printed, wanted)
