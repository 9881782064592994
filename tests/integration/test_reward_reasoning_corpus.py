"""Step validity and logical consistency, measured: 300 correct worked solutions, one step corrupted in each."""

from __future__ import annotations

import pytest

from tests.worked_solutions import Measured, corrupt, load, measure


@pytest.fixture(scope="module")
def measured() -> Measured:
    return measure(0)


def test_the_corpus_is_large_sourced_and_without_repeats() -> None:
    solutions = load()
    assert len(solutions) == 300
    assert len({solution.id for solution in solutions}) == 300
    assert len({solution.text for solution in solutions}) == 300
    assert {solution.licence for solution in solutions} == {"MIT", "Apache-2.0"}


def test_one_step_of_each_is_corrupted_and_the_seed_decides_which() -> None:
    for solution in load():
        once, again = corrupt(solution, 0), corrupt(solution, 0)
        assert once == again
        assert once.text != solution.text
        assert once.text[: once.place] == solution.text[: once.place] or once.kind == "result"
    assert any(corrupt(solution, 0) != corrupt(solution, 1) for solution in load())


def test_a_correct_solution_is_hardly_ever_flagged(measured: Measured) -> None:
    assert measured.precision >= 0.98, measured.false_alarms


def test_most_solutions_are_judged(measured: Measured) -> None:
    assert measured.both_abstained <= measured.num_solutions // 2
    assert measured.steps_abstained <= measured.num_solutions // 2
    assert measured.consistency_abstained <= measured.num_solutions // 2


def test_the_recall_that_the_documentation_states(measured: Measured) -> None:
    assert measured.recall >= 0.6
    assert measured.found["result"] >= 0.9 * measured.made["result"]
