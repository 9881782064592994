"""HumanEval as its users know it: right solutions pass, and changed ones fail."""

from __future__ import annotations

import pytest

from tests.humaneval_mutants import judge_programs, read_mutants, solutions

LIMIT_S = 60.0


def test_all_164_canonical_solutions_pass() -> None:
    programs = list(solutions().items())
    parts = judge_programs(programs, LIMIT_S)
    failed = {name: part.explanation for (name, _), part in zip(programs, parts, strict=True) if part.value != 1.0}
    assert len(parts) == 164
    assert failed == {}


def test_mutants_fail_but_for_those_that_are_equivalent() -> None:
    solved, mutants = solutions(), read_mutants()
    parts = judge_programs([(one.problem, one.program(solved[one.problem])) for one, _ in mutants], LIMIT_S)
    wrong = {
        mutant: part.explanation
        for (mutant, equivalent), part in zip(mutants, parts, strict=True)
        if part.value != float(bool(equivalent)) or not part.explanation.startswith(("Passed", "Wrong answer"))
    }
    assert wrong == {}


def test_every_problem_has_a_mutant_that_must_fail() -> None:
    assert {one.problem for one, equivalent in read_mutants() if not equivalent} == set(solutions())


@pytest.mark.parametrize("name", ["HumanEval/0", "HumanEval/163"])
def test_a_mutant_differs_from_the_solution_where_it_says(name: str) -> None:
    solution = solutions()[name]
    for mutant, _ in read_mutants():
        if mutant.problem == name:
            changed = mutant.program(solution)
            assert changed != solution
            assert changed[mutant.start :].startswith(mutant.now)
