"""What honest programs may do in the sandbox, and what tests see of them."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator

import pytest

from grpo_engine.config_rewards import SandboxConfig
from grpo_engine.reward.sandbox.jobs import CheckJob, Outcome, ProgramJob
from grpo_engine.reward.sandbox.pool import SandboxPool
from tests.sandbox_tiers import available

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", params=available())
def pool(request: pytest.FixtureRequest) -> Iterator[SandboxPool]:
    with SandboxPool(SandboxConfig(num_slots=1, memory_mib=512, max_processes=40), request.param) as made:
        yield made


def check(pool: SandboxPool, program: str, tests: str) -> Outcome:
    return pool.run(CheckJob(program, tests, time_limit_s=60.0))


PROGRAMS = {
    "standard library": (
        "import json, re, decimal, sqlite3, xml.dom.minidom, concurrent.futures, uuid, secrets, zoneinfo, ssl, csv\n"
        "print(len(secrets.token_hex(2)), uuid.uuid4().version, zoneinfo.ZoneInfo('Europe/Berlin'))",
        "4 4 Europe/Berlin\n",
    ),
    "asyncio": (
        "import asyncio\nasync def main():\n    await asyncio.sleep(0.01)\n    print('ok')\nasyncio.run(main())",
        "ok\n",
    ),
    "threads": (
        "from concurrent.futures import ThreadPoolExecutor as T\nprint(list(T(32).map(str, range(3))))",
        "['0', '1', '2']\n",
    ),
    "files": (
        "import os, tempfile\nopen('a', 'w').write('x')\nos.rename('a', 'b')\n"
        "with tempfile.TemporaryFile() as f: f.write(b'y')\nprint(os.listdir('.'), open('b').read())\nos.remove('b')",
        "['b'] x\n",
    ),
    "recursion": (
        "import sys\nsys.setrecursionlimit(10**5)\ndef f(n): return n and 1 + f(n - 1)\nprint(f(20000))",
        "20000\n",
    ),
    "unittest": (
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(1, 1)\n"
        "r = unittest.main(argv=['x'], exit=False)\nprint(r.result.testsRun, r.result.wasSuccessful())",
        "1 True\n",
    ),
    "a main guard": ("if __name__ == '__main__': print('main')", "main\n"),
    "what runs at exit": ("import atexit\natexit.register(print, 'bye')\nprint('hi')", "hi\nbye\n"),
    "a thread that goes on": (
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.05), print('late'))).start()",
        "late\n",
    ),
    "dataclasses and pickles": (
        "import dataclasses, pickle\n@dataclasses.dataclass\nclass P:\n    x: int\n"
        "print(pickle.loads(pickle.dumps(P(3))))",
        "P(x=3)\n",
    ),
    "the clock": ("import time\nt = time.time()\nprint(t > 1.7e9, time.monotonic() >= 0)", "True True\n"),
    "sys.exit(0)": ("import sys\nprint('x')\nsys.exit(0)", "x\n"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_honest_program_runs(pool: SandboxPool, name: str) -> None:
    program, expected = PROGRAMS[name]
    outcome = pool.run(ProgramJob(program, time_limit_s=60.0))
    assert (outcome.end, outcome.runs[0].stdout, outcome.error) == ("finished", expected, "")


def test_every_input_has_a_fresh_process(pool: SandboxPool) -> None:
    outcome = pool.run(
        ProgramJob("import sys\nprint(sum(map(int, sys.stdin.read().split())))", ("1 2\n", "", "3 4"), 60.0)
    )
    assert [run.stdout for run in outcome.runs] == ["3\n", "0\n", "7\n"]
    assert (outcome.complete, outcome.num_processes) == (True, 3)


@pytest.mark.parametrize(
    ("program", "end", "error"),
    [
        ("def f(:", "compile_error", "SyntaxError: invalid syntax (line 1)"),
        ("x = '\0'", "compile_error", "SyntaxError: source code string cannot contain null byte"),
        ("x = '\ud800'", "compile_error", "SyntaxError: (unicode error) 'utf-8' codec can't decode"),
        ("(" * 3000, "compile_error", "SyntaxError: too many nested parentheses (line 1)"),
        ("\n\n1 / 0", "exception", "ZeroDivisionError: division by zero (line 3)"),
        ("raise MemoryError", "memory", "MemoryError"),
        ("x = [0] * (1 << 40)", "memory", "MemoryError"),
        ("import sys\nsys.exit(3)", "exited", "exit status 3"),
        ("import sys\nsys.exit('no')", "exited", "exit status 1"),
        ("import os\nos._exit(5)", "exited", "exit status 5"),
        ("import os\nos.abort()", "crashed", "SIGABRT"),
        ("input()", "exception", "EOFError: EOF when reading a line (line 1)"),
    ],
)
def test_the_ways_to_fail_are_told_apart(pool: SandboxPool, program: str, end: str, error: str) -> None:
    outcome = pool.run(ProgramJob(program, time_limit_s=60.0))
    assert (outcome.end, outcome.error[: len(error)], outcome.complete) == (end, error, False)


def test_what_a_program_prints_under_tests_is_kept_and_says_nothing(pool: SandboxPool) -> None:
    outcome = check(
        pool, "print('loading')\ndef f():\n    print('called')\n    return 1", "__report__(__program__('f')() == 1)"
    )
    assert (outcome.stdout, outcome.reports, outcome.complete) == ("loading\ncalled\n", ((True, ""),), True)


PROGRAM = """
import collections
CONSTANT = {"a": (1, 2)}
def add(a, b=1): return a + b
def sort_in_place(items): items.sort()
def clear_all(d, s): d.clear(); s.add(9)
def apply(function, items): return [function(item) for item in items]
def lazily(n): yield from range(n)
def make_adder(n): return lambda x: x + n
def fail(kind): raise kind("message")
class Mine(KeyError): pass
def fail_mine(): raise Mine("mine")
class Stack:
    limit = 3
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x); return self
    def pop(self): return self.items.pop()
def size(stack): return len(stack.items)
class Point(collections.namedtuple("Point", "x y")): pass
def stop(): raise StopIteration
def large(): return "x" * (5 << 20)
"""
CASES = {
    "keywords": "get('add')(1, b=2) == 3 and get('add')(1) == 2",
    "constants": "get('CONSTANT') == {'a': (1, 2)}",
    "arguments changed in place": "(x := [3, 1], get('sort_in_place')(x), x)[2] == [1, 3]",
    "sets changed in place": "(d := {1: 2}, s := {1}, get('clear_all')(d, s)) and (d, s) == ({}, {1, 9})",
    "functions as arguments": "get('apply')(lambda x: x * 2, [1, 2]) == [2, 4]",
    "generators": "list(get('lazily')(3)) == [0, 1, 2] and next(get('lazily')(1)) == 0",
    "returned functions": "get('make_adder')(3)(4) == 7",
    "classes": "get('Stack')().push(1).push(2).pop() == 2",
    "attributes": "get('Stack')().push(5).items == [5] and get('Stack').limit == 3",
    "dotted names": "get('Stack.limit') == 3",
    "objects passed back": "get('size')(get('Stack')().push(1)) == 1",
    "named tuples": "get('Point')(1, 2) == (1, 2)",
    "exceptions by name": "raised(lambda: get('add')(1, 'a')) == 'TypeError'",
    "exceptions of its own by their base": "raised(get('fail_mine')) == 'KeyError'",
    "missing names": "raised(lambda: get('nothing')) == 'NameError'",
    "values that are too large": "raised(get('large')) == 'ValueError' and get('add')(1) == 2",
    "an early StopIteration": "raised(lambda: list(map(lambda f: f(), [get('stop')]))) == 'RuntimeError'",
    "objects that are compared": "raised(lambda: get('Stack')() == 1).startswith('TypeError')",
    "objects that are compared with None": "(get('Stack')() == None) is False and get('Stack')() != None",
    "objects that are taken for true": "raised(lambda: bool(get('Stack')())).startswith('TypeError')",
}
HELPER = """
get = __program__
def raised(act):
    try: act()
    except Exception as error: return type(error).__name__
"""


@pytest.mark.parametrize("name", CASES)
def test_tests_see_of_a_program(pool: SandboxPool, name: str) -> None:
    outcome = check(pool, PROGRAM, f"{HELPER}__report__({CASES[name]}, 'case')")
    assert (outcome.reports, outcome.complete, outcome.error) == (((True, "case"),), True, "")


@pytest.mark.parametrize(
    ("tests", "end"),
    [
        ("def f(:", "tests_failed_to_run"),
        ("import nowhere", "tests_failed_to_run"),
        ("raise KeyboardInterrupt", "tests_failed_to_run"),
        ("f = __program__('add')\nassert f(1) == 3", "exception"),
    ],
)
def test_broken_tests_are_a_fault_of_the_data_until_the_program_had_a_say(
    pool: SandboxPool, tests: str, end: str
) -> None:
    outcome = check(pool, PROGRAM, tests)
    assert (outcome.end, outcome.complete) == (end, False)


TOO_LONG = b"\xff\xff\xff\xff"


@pytest.mark.parametrize(
    ("sent", "then"),
    [(b"\3\0\0\0[1]", "return 1"), (b'\x0b\0\0\0{"value":1}', "os._exit(0)"), (TOO_LONG, "return 1")],
)
def test_a_program_that_breaks_the_line_or_is_gone_at_the_end_is_not_complete(
    pool: SandboxPool, sent: bytes, then: str
) -> None:
    program = f"""import os
def f():
    for number in range(3, 256):
        try: os.write(number, {sent!r})
        except OSError: pass
    {then}
"""
    tests = "f = __program__('f')\ntry: x = f()\nexcept BaseException: x = 1\n__report__(x == 1, 'f()')"
    outcome = check(pool, program, tests)
    assert (outcome.end, outcome.complete, outcome.reports) == ("exited", False, ((True, "f()"),))


def test_what_a_program_says_it_raised_never_ends_the_tests(pool: SandboxPool) -> None:
    reply = b'{"raise":["SystemExit","KeyboardInterrupt","object"],"message":"x"}'
    program = f"""import os, struct
def f():
    for number in range(3, 256):
        try: os.write(number, struct.pack("I", {len(reply)}) + {reply!r})
        except OSError: pass
    os._exit(0)
"""
    outcome = check(pool, program, f"{HELPER}__report__(raised(get('f')) == 'RuntimeError', 'f()')")
    assert (outcome.end, outcome.reports) == ("exited", ((True, "f()"),))


def test_a_memory_error_that_fails_a_case_is_told_as_one(pool: SandboxPool) -> None:
    outcome = check(pool, "def f(): raise MemoryError", f"{HELPER}__report__(raised(__program__('f')) is None, 'f()')")
    assert (outcome.end, outcome.complete, outcome.reports) == ("memory", True, ((False, "f()"),))


def test_reports_and_their_texts_are_kept_up_to_a_limit(pool: SandboxPool) -> None:
    outcome = check(pool, "", "for _ in range(10_005): __report__(True, 'x' * 400)")
    assert (len(outcome.reports), len(outcome.reports[0][1]), outcome.complete) == (10_000, 300, True)


def test_neither_side_finds_the_other_side_or_the_project(pool: SandboxPool) -> None:
    told = check(
        pool, "import os\nseen = os.environ.keys()\ndef where(): return __name__", "__report__(__program__('where')())"
    )
    assert told.reports == ((True, ""),)
    names = check(pool, "import os\nseen = sorted(os.environ)", "__report__(False, str(__program__('seen')))").reports[
        0
    ][1]
    assert set(ast.literal_eval(names)) <= {"HOME", "LANG", "LC_CTYPE", "PATH", "TMPDIR"}


def test_program_and_tests_are_users_of_their_own_without_groups(pool: SandboxPool) -> None:
    who = "[*os.getresuid(), *os.getresgid()], os.getgroups()"
    told = check(pool, f"import os\nwho = {who}", f"import os\n__report__(True, str([__program__('who'), ({who})]))")
    program, tests = ast.literal_eval(told.reports[0][1])
    if os.geteuid() == 0:
        assert program == ([program[0][0]] * 6, [])
        assert tests == ([tests[0][0]] * 6, [])
        assert len({0, program[0][0], tests[0][0]}) == 3
    assert (program == tests) is (os.geteuid() != 0)


def test_a_program_finds_its_limits_set_and_hard(pool: SandboxPool) -> None:
    names = ["CORE", "NOFILE", "MEMLOCK", "MSGQUEUE", "FSIZE", "CPU"]
    source = f"import resource as r\nprint([r.getrlimit(getattr(r, 'RLIMIT_' + name)) for name in {names}])"
    found = ast.literal_eval(pool.run(ProgramJob(source, time_limit_s=60.0)).runs[0].stdout)
    file_bytes, cpu_s = pool.config.file_mib << 20, pool.config.cpu_limit_s
    assert found == [(0, 0), (64, 64), (0, 0), (0, 0), (file_bytes, file_bytes), (cpu_s, cpu_s + 1)]


def test_the_tests_cannot_write_files_either(pool: SandboxPool) -> None:
    outcome = check(pool, "", "open('/tmp/x', 'w')")
    assert outcome.end == "tests_failed_to_run"
    assert "Error" in outcome.error


def test_equal_jobs_give_equal_values() -> None:
    program = "import random\nprint(random.random(), hash('a'), list({'a', 'b', 'c'}))"
    with SandboxPool(SandboxConfig(num_slots=2), available()[-1]) as pool:
        assert (
            len({outcome.runs[0].stdout for outcome in pool.run_all([ProgramJob(program, time_limit_s=60.0)] * 4)}) == 1
        )
