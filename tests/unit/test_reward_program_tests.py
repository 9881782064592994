"""A dataset's tests, made into cases that are judged one by one."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_engine.reward.program_cases import StreamCases, cases_problem, read_cases
from grpo_engine.reward.program_tests import CallCases, assert_tests, check_tests
from grpo_engine.reward.program_verdicts import judge
from grpo_engine.reward.sandbox.jobs import Outcome

Reports = list[tuple[bool, str]]


def run(cases: CallCases, program: str) -> Reports:
    """As the sandbox does, without the sandbox."""
    candidate: dict[str, Any] = {}
    exec(program, candidate)
    reports: Reports = []

    def ask(name: str) -> Any:
        if name not in candidate:
            raise NameError(f"the program does not define {name}")
        return candidate[name]

    module = {"__program__": ask, "__report__": lambda passed, text: reports.append((passed, text))}
    exec(cases.source, {**module, "__name__": "__tests__"})
    return reports


ADD = "def add(a, b):\n    return a + b\n"
SUBTRACT = "def add(a, b):\n    return a - b\n"
UNBOUND = "UnboundLocalError: cannot access local variable 'total' where it is not associated with a value"
THREE = """
METADATA = {'author': 'someone'}
def check(candidate):
    "Three."
    assert True, "This prints if this assert fails"
    assert candidate(1, 2) == 3
    assert 0 == candidate(0, 0)
    assert candidate(5, 7) == 12, "message"
"""


def check(body: str, *, first: bool = False, prompt: str = "") -> CallCases:
    return check_tests(f"def check(candidate):\n{body}", "add", prompt, first_failure_ends=first)


def test_each_assert_of_check_is_a_case() -> None:
    cases = check_tests(THREE, "add", first_failure_ends=False)
    assert cases.num_cases == 3
    assert run(cases, ADD) == [(True, "passed")] * 3
    assert run(cases, SUBTRACT) == [
        (False, "wrong: candidate(1, 2) gave -1 instead of 3"),
        (True, "passed"),
        (False, "wrong: candidate(5, 7) gave -2 instead of 12"),
    ]


def test_the_first_failure_may_end_the_tests() -> None:
    assert len(run(check_tests(THREE, "add", first_failure_ends=True), SUBTRACT)) == 1


def test_cases_in_loops_are_counted_when_they_run() -> None:
    cases = check("    for n in range(3):\n        if n:\n            assert candidate(n, 1) == n + 1\n")
    assert cases.num_cases is None
    assert [passed for passed, _ in run(cases, ADD)] == [True, True]
    assert [passed for passed, _ in run(cases, SUBTRACT)] == [False, False]


def test_a_call_of_a_function_that_asserts_is_one_case() -> None:
    helper = "def same(given, wanted):\n    assert given == wanted\n    assert type(given) is int\n"
    body = "def check(candidate):\n    same(candidate(1, 1), 2)\n    same(candidate(2, 2), 0)\n"
    cases = check_tests(helper + body, "add", first_failure_ends=False)
    assert cases.num_cases == 2
    assert run(cases, ADD) == [(True, "passed"), (False, "wrong: same(candidate(2, 2), 0) ended with AssertionError")]


def test_an_expected_exception_is_one_case() -> None:
    cases = check("    try:\n        candidate('a', 1)\n        assert False\n    except TypeError:\n        pass\n")
    assert run(cases, ADD) == [(True, "passed")]
    assert run(cases, "def add(a, b): return 0") == [(False, "wrong: try: ended with AssertionError")]


def test_preparation_counts_only_when_it_fails() -> None:
    cases = check("    total = candidate(1, 2)\n    total += 0\n    assert total == 3\n")
    assert run(cases, ADD) == [(True, "passed")]
    assert [text for _, text in run(cases, "def add(a): return 0")] == [
        "raised: total = candidate(1, 2) ended with TypeError: add() takes 1 positional argument but 2 were given",
        f"raised: total += 0 ended with {UNBOUND}",
        f"raised: total ended with {UNBOUND}",
    ]


def test_a_program_without_the_function_has_one_failure() -> None:
    assert run(check("    assert candidate(1, 2) == 3\n"), "x = 1") == [
        (False, "missing: the program does not define add")
    ]


@pytest.mark.parametrize(("wrong_from", "value"), [(10_000, 1.0), (4_500, 0.9), (-1, 0.0)])
def test_thousands_of_cases_are_counted_in_the_end(wrong_from: int, value: float) -> None:
    cases = check("    for n in range(5000):\n        assert candidate(n, 0) == n\n")
    reports = run(cases, f"def add(a, b): return a if a < {wrong_from} else -1")
    assert len(reports) <= 2001
    outcome = Outcome("finished", reports=tuple(reports), complete=True)
    assert judge(cases, outcome, "share")[0] == value


def test_a_failure_after_thousands_of_passes_is_told() -> None:
    cases = check("    for n in range(5000):\n        assert candidate(n, 0) == n\n", first=True)
    reports = run(cases, "def add(a, b): return a if a < 4500 else -1")
    assert reports[1000:] == [(False, "wrong: candidate(n, 0) gave -1 instead of 4500"), (False, "total: 4500 1")]


def test_what_cannot_be_shown_does_not_hide_the_verdict() -> None:
    [(passed, text)] = run(check("    assert candidate(1, 10**5000) == 0\n"), ADD)
    assert not passed
    assert text.startswith("wrong: candidate(1, 10 ** 5000) gave what cannot be shown")


def test_helpers_of_the_prompt_serve_program_and_tests() -> None:
    prompt = 'import math\ndef half(x):\n    return x / 2\n\ndef add(a, b):\n    """Add."""\n'
    cases = check("    assert half(candidate(2, 2)) == math.sqrt(4)\n", prompt=prompt)
    assert cases.preamble == "import math\n\ndef half(x):\n    return x / 2\n"
    assert cases.opening == prompt
    assert run(cases, ADD) == [(True, "passed")]


@pytest.mark.parametrize("prompt", ["Add two numbers.", "x = 1", "", "def other(): pass", "def add(("])
def test_a_prompt_that_is_not_the_functions_opening_gives_nothing(prompt: str) -> None:
    cases = check("    assert candidate(1, 2) == 3\n", prompt=prompt)
    assert (cases.preamble, cases.opening) == ("", "")


def test_a_method_can_be_the_candidate() -> None:
    cases = check_tests("def check(candidate):\n    assert candidate(1, 2) == 3", "Solution().add")
    assert run(cases, "class Solution:\n    def add(self, a, b): return a + b") == [(True, "passed")]


def test_asserts_of_a_list_find_the_functions_that_they_name() -> None:
    setup = "import math\ndef near(a, b): return math.isclose(a, b)"
    cases = assert_tests(["assert near(area(1), 3.14159265359)", "assert area(0) == 0"], setup)
    assert cases.defines == "area"
    assert cases.num_cases == 2
    assert run(cases, "def area(r): return 3.14159265359 * r * r") == [(True, "passed")] * 2


def test_modules_of_the_standard_library_are_not_the_programs_to_define() -> None:
    forged = "class math:\n    def isclose(*a, **k): return True\ndef area(r): return 0\n"
    cases = assert_tests(["assert math.isclose(area(1), 3.14, rel_tol=0.01)"], first_failure_ends=False)
    assert (cases.defines, cases.num_cases) == ("area", 1)
    assert [passed for passed, _ in run(cases, forged)] == [False]
    assert run(cases, "def area(r): return 3.14 * r * r") == [(True, "passed")]
    assert [passed for passed, _ in run(check("    assert math.isclose(candidate(1, 2), 4)\n"), ADD + forged)] == [
        False
    ]


def test_what_is_called_like_a_module_but_is_none_is_the_programs() -> None:
    cases = assert_tests(["assert copy([3, 1]) == [3, 1]", "assert queue.pop() == 2", "assert string.longest() == 'a'"])
    program = "class queue:\n    def pop(): return 2\nclass string:\n    def longest(): return 'a'\ncopy = list\n"
    assert run(cases, program) == [(True, "passed")] * 3


def test_setup_may_use_what_the_program_defines() -> None:
    cases = assert_tests(["assert height(root) == 1"], "root = Node(1)")
    assert run(cases, "class Node:\n    def __init__(self, n): self.n = n\ndef height(node): return node.n") == [
        (True, "passed")
    ]


def test_tests_that_fail_by_themselves_fail_before_anything_is_asked_of_the_program() -> None:
    cases = check_tests("import no_such_module\ndef check(candidate):\n    assert candidate()", "add")
    with pytest.raises(ModuleNotFoundError):
        exec(cases.source, {"__program__": None, "__report__": None})


NO_TESTS = "the prompt has no tests; it needs test and entry_point, or test_list, or inputs and outputs"
PROBLEMS: list[tuple[dict[str, Any], str]] = [
    ({}, NO_TESTS),
    ({"test": "def check(c): assert c()"}, "column entry_point is missing; it must be a text"),
    ({"test": "def check(c): assert c()", "entry_point": "a b"}, "it must be a name such as add or Solution().add"),
    ({"test": "def check(c): assert c()", "entry_point": "os.system('x')"}, "must be a name"),
    ({"test": "def check(c):", "entry_point": "f"}, "column test is no Python"),
    ({"test": "assert f()", "entry_point": "f"}, "column test defines no function check(candidate)"),
    ({"test": "def check(): assert f()", "entry_point": "f"}, "column test defines no function check(candidate)"),
    ({"test": "def check(c): pass", "entry_point": "f"}, "column test holds no assert"),
    ({"test": "def check(c): assert True", "entry_point": "f"}, "column test holds no assert"),
    ({"test": "def f(): pass\ndef check(c): assert c()", "entry_point": "f"}, "column test defines f itself"),
    ({"test_list": []}, "column test_list is empty"),
    ({"test_list": "assert f()"}, "column test_list is a str; it must be a list of texts"),
    ({"test_list": ["assert f("]}, "column test_list[0] is no Python"),
    ({"test_list": ["assert 1 + 1 == 2"]}, "column test_list asks for nothing that the program defines"),
    ({"test_list": ["f()"]}, "column test_list holds no assert"),
    ({"test_list": ["assert f()"], "test_setup_code": "import ("}, "column test_setup_code is no Python"),
    ({"inputs": ["1"]}, "column outputs is missing"),
    ({"inputs": ["1"], "outputs": [1]}, "column outputs is a list; it must be a list of texts"),
    ({"inputs": ["1"], "outputs": ["1", "2"]}, "column inputs has 1 texts and outputs 2; they must be as many"),
]


@pytest.mark.parametrize(("columns", "problem"), PROBLEMS)
def test_columns_without_usable_tests_are_named(columns: dict[str, Any], problem: str) -> None:
    assert problem in (cases_problem(columns) or "")


def test_columns_decide_which_cases_there_are() -> None:
    assert read_cases({"inputs": ["1"], "outputs": ["2"]}) == StreamCases(("1",), ("2",))
    mbpp = {"test_list": ["assert f(1) == 2"], "test_setup_code": "", "test_imports": []}
    assert isinstance(read_cases(mbpp), CallCases)
    assert cases_problem({**mbpp, "inputs": ["1"]}, "stdin") == "column outputs is missing; it must be a list of texts"
