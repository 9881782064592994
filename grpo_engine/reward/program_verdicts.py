"""From what the sandbox says about a program to its value and a sentence. Torch-free.

Every sentence begins with what it was: Passed, Wrong answer, Error, Compile error, Time limit, Memory limit, Crash or
Early exit; or with why nothing can be said.
"""

from __future__ import annotations

from typing import Literal

from grpo_engine.reward.program_cases import Cases, StreamCases
from grpo_engine.reward.program_tests import CallCases
from grpo_engine.reward.sandbox.jobs import Outcome, Run

Credit = Literal["share", "all"]
_SHOWN_CHARACTERS = 100
_SAID = {
    "compile_error": "Compile error",
    "exception": "Error",
    "exited": "Early exit",
    "time": "Time limit",
    "memory": "Memory limit",
    "crashed": "Crash",
}


def judge(cases: Cases, outcome: Outcome, credit: Credit) -> tuple[float | None, str]:
    """Value and explanation. None when the sandbox or the tests failed, not the program."""
    if outcome.end == "refused":
        return None, f"The sandbox could not run it: {outcome.error}."
    if outcome.end == "tests_failed_to_run":
        return None, f"The tests of this prompt do not run: {outcome.error}."
    if isinstance(cases, StreamCases):
        return _judge_streams(cases, outcome, credit)
    return _judge_tests(cases, outcome, credit)


def same_output(printed: str, wanted: str) -> bool:
    """Equal line by line; white space at the ends of lines and empty lines at the end do not count."""
    return _lines(printed) == _lines(wanted)


# ---------------------------------------------------------------- tests
def _judge_tests(cases: CallCases, outcome: Outcome, credit: Credit) -> tuple[float | None, str]:
    passed, num_failed, failed = _counts(outcome)
    # What ended in the midst of a case has failed that one.
    total = max(cases.num_cases or 0, passed + num_failed + (not outcome.complete))
    if outcome.complete and not outcome.reports:
        return None, "The tests of this prompt ran through without testing anything."
    if outcome.complete and not num_failed and passed >= total:
        return 1.0, f"Passed: {_cases(passed)}."
    known = outcome.complete or cases.num_cases is not None
    # Where nobody knows how many cases a program escaped by ending early, it gets nothing.
    value = passed / total if credit == "share" and known and not _is_missing(failed) else 0.0
    so_far = f"{passed} of {total} cases passed." if known and credit == "share" else f"{_cases(passed)} passed before."
    return value, _why_not(outcome, failed, so_far if passed or credit == "share" else "")


def _counts(outcome: Outcome) -> tuple[int, int, list[str]]:
    """Cases passed, cases failed, and what was said of the failures; of very many the tests say the totals at last."""
    passed = sum(told for told, _ in outcome.reports)
    failed = [text for told, text in outcome.reports if not told]
    if outcome.reports and outcome.reports[-1][1].startswith("total: "):
        _, all_passed, all_failed = outcome.reports[-1][1].split()
        return int(all_passed), int(all_failed), [text for text in failed if not text.startswith("total: ")]
    return passed, len(failed), failed


def _is_missing(failed: list[str]) -> bool:
    return any(text.startswith("missing") for text in failed)


def _why_not(outcome: Outcome, failed: list[str], so_far: str) -> str:
    if outcome.end != "finished":
        return f"{_SAID[outcome.end]}: {_sentence(outcome.error)} {so_far}".rstrip()
    if not failed:
        return f"Wrong answer: the tests ended early. {so_far}".rstrip()
    kind, _, text = failed[0].partition(": ")
    if kind == "missing":
        return f"Error: {_sentence(text)}"
    return f"{'Wrong answer' if kind == 'wrong' else 'Error'}: {_sentence(text)} {so_far}".rstrip()


# ---------------------------------------------------------------- inputs and outputs
def _judge_streams(cases: StreamCases, outcome: Outcome, credit: Credit) -> tuple[float | None, str]:
    pairs = list(enumerate(zip(outcome.runs, cases.outputs, strict=False), 1))
    for number, (run, wanted) in pairs:
        if run.output_cut and len(wanted.encode("utf-8", "replace")) > len(run.stdout.encode("utf-8", "replace")):
            return None, f"The output wanted in case {number} is longer than the sandbox keeps (sandbox.output_kib)."
    verdicts = [_judge_run(run, number, wanted) for number, (run, wanted) in pairs]
    passed, total = sum(not verdict for verdict in verdicts), len(cases.outputs)
    if passed == total:
        return 1.0, f"Passed: {_cases(total)}."
    first = next((verdict for verdict in verdicts if verdict), f"{_SAID.get(outcome.end, 'Error')}: {outcome.error}.")
    return passed / total if credit == "share" else 0.0, f"{first} {passed} of {total} cases passed."


def _judge_run(run: Run, number: int, wanted: str) -> str:
    """What is wrong with one run, as a sentence; empty when nothing is."""
    if run.end != "finished":
        return f"{_SAID.get(run.end, 'Error')} in case {number}: {_sentence(run.error)}"
    if run.output_cut:
        return f"Wrong answer in case {number}: it printed more than is kept."
    if same_output(run.stdout, wanted):
        return ""
    return f"Wrong answer in case {number}: printed {_shown(run.stdout)} instead of {_shown(wanted)}."


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


# ---------------------------------------------------------------- words
def _cases(number: int) -> str:
    return "1 case" if number == 1 else f"{number} cases"


def _sentence(text: str) -> str:
    return text if text.endswith((".", "…")) else f"{text}."


def _shown(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…")
