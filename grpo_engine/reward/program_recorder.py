"""Runs inside the tests' process, before the tests: how a case is judged and told. Standard library alone.

`program_tests.py` puts this file's source in front of the tests, so it must run by itself, and its names are long
enough not to meet those of a dataset.
"""

from __future__ import annotations

from collections.abc import Callable

COHORT_SHOWN_CHARACTERS = 100
COHORT_MAX_TOLD = 1000


class CohortStop(BaseException):
    """Nothing more is to be learned: the first failure decides."""


class CohortRecorder:
    """Says through `report` how each case went: "passed", "wrong: ...", "raised: ..." or "missing: ...".

    Of passes and of failures 1,000 each are told as they happen; `end` tells how many there were when there were more.
    """

    def __init__(self, report: Callable[[bool, str], None], first_failure_ends: bool) -> None:
        self._report = report
        self._first_failure_ends = first_failure_ends
        self._num_passed = 0
        self._num_failed = 0

    def judge(self, given: object, case: str) -> None:
        """A condition that must be true."""
        try:
            passed = bool(given)
        except Exception as error:  # an object of the program is neither true nor false
            return self.raised(error, case)
        return self._pass() if passed else self._fail(f"wrong: {case} is false")

    def compare(self, given: object, wanted: object, case: str) -> None:
        """Two values that must be equal."""
        try:
            passed = bool(given == wanted)
        except Exception as error:
            return self.raised(error, case)
        if passed:
            return self._pass()
        return self._fail(f"wrong: {case} gave {cohort_shown(given)} instead of {cohort_shown(wanted)}")

    def done(self) -> None:
        """A statement that must not raise."""
        self._pass()

    def raised(self, error: Exception, case: str) -> None:
        kind = "wrong" if isinstance(error, AssertionError) else "raised"
        message = f": {error}" if str(error) else ""
        self._fail(f"{kind}: {case} ended with {type(error).__name__}{message}")

    def missing(self, error: Exception) -> None:
        self._report(False, f"missing: {error}")
        raise CohortStop

    def end(self) -> None:
        if max(self._num_passed, self._num_failed) > COHORT_MAX_TOLD:
            self._report(not self._num_failed, f"total: {self._num_passed} {self._num_failed}")

    def _pass(self) -> None:
        self._num_passed += 1
        if self._num_passed <= COHORT_MAX_TOLD:
            self._report(True, "passed")

    def _fail(self, text: str) -> None:
        self._num_failed += 1
        if self._num_failed <= COHORT_MAX_TOLD:
            self._report(False, text)
        if self._first_failure_ends:
            raise CohortStop


def cohort_shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception as error:  # an integer of 5,000 digits, or an object of the program
        text = f"what cannot be shown ({error})"
    return text if len(text) <= COHORT_SHOWN_CHARACTERS else text[: COHORT_SHOWN_CHARACTERS - 1] + "…"
