"""The walk that spares pyflakes: what it proves pyflakes finds too, and what it does not follow it leaves alone."""

from __future__ import annotations

import ast
from textwrap import indent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_engine.reward.code_calls import find_forbidden
from grpo_engine.reward.code_quality import _undefined_names
from grpo_engine.reward.code_quality_proofs import may_use, words_of_plain_program

PLAIN = {
    "a name that is bound later": "def f(n):\n    return g(n)\ndef g(n):\n    return n",
    "a name of the function around": "def f(n):\n    m = n\n    def g():\n        return m\n    return g",
    "comprehensions": "a = [x * y for x in range(3) for y in range(x) if y]\nb = {k: v for k, v in zip(a, a)}",
    "a lambda": "f = lambda n, m=3, *rest, key=None: n + m\nprint(f(1))",
    "all kinds of arguments": "def f(a, /, b, *c, d=1, **e):\n    return a, b, c, d, e",
    "imports": "import os.path, sys as s\nfrom math import pi as p\nprint(os, s, p)",
    "typing": "from typing import List\ndef f(n: List[int], word='a') -> List[str]:\n    return [word] * n[0]",
    "a handler": "try:\n    print(1)\nexcept (OSError, TypeError) as error:\n    print(error)\nfinally:\n    print(2)",
    "statements": "x = 0\nwhile x < 3:\n    x += 1\n    if x == 2: continue\n    else: pass\nassert x, 3",
    "a decorator": "import functools\n@functools.cache\ndef f(n):\n    return f'{n:>{n}}' + str({**{}, 'a': -n})",
    "with": "with open('a') as file, open('b') as (c, *d):\n    file.a[1:2] = c, d",
    "a builtin that a function sets": "def f(n):\n    max = n\n    return max",
    "an annotated variable": "x: int = 3\nprint(x)",
}  # fmt: skip
FAULTY = {
    "nowhere bound": "print(total)",
    "bound too late": "print(total)\ntotal = 1",
    "bound in another function": "def f():\n    n = 1\ndef g():\n    return n",
    "a comprehension's variable": "a = [x for x in range(3)]\nprint(x)",
    "read before it is set": "n = 0\ndef f():\n    print(n)\n    n = 1",
    "added to before it is set": "n = 0\ndef f():\n    n += 1",
    "read before it is set, also in a list": "n = 0\ndef f():\n    print([n for _ in '3'])\n    print(n)\n    n = 1",
    "a builtin read before it is set": "def f(a):\n    print(max(a))\n    max = 1",
    "a handler's name behind it": "try:\n    print(1)\nexcept ValueError as error:\n    pass\nprint(error)",
    "a handler's name in a function": "try:\n    pass\nexcept ValueError as e:\n    f = lambda: e\nf()",
    "a handler's name read before": "e = 1\ndef f():\n    print(e)\n    try: 1\n    except ValueError as e: 2",
    "deleted": "n = 1\ndel n\nprint(n)",
    "never deleted": "del n",
    "a class's variable in its method": "class A:\n    n = 1\n    def f(self):\n        return n",
    "annotated only": "x: int\nprint(x)",
    "a quoted argument": "def f(n: 'Missing'):\n    return n",
    "a quoted result": "def f(n) -> 'Missing':\n    return n",
    "a quoted argument of many": "def f(*n: 'Missing', **m: 'Other'):\n    return n, m",
    "a quoted variable": "x: 'Missing' = 3",
    "a quote within typing": "from typing import List\nx = List['Missing']",
    "a quote within a quote's brackets": "import typing as t\ndef f(n: t.List[dict['Missing', int]]):\n    return n",
    "a quote that typing casts to": "from typing import cast\nx = cast('Missing', 3)",
    "a quote that typing's module casts to": "import typing\nx = typing.cast('Missing', 3)",
    "a quoted alias": "from typing import TypeAlias\nX: TypeAlias = 'Missing'",
    "annotations of the future": "from __future__ import annotations\ndef f(n: Missing):\n    return n",
    "a default": "def f(n=missing):\n    return n",
    "a keyword's default": "def f(*, n=missing):\n    return n",
    "a decorator": "@missing\ndef f():\n    pass",
    "an annotation": "def f(n: missing):\n    return n",
    "in a slice": "a = [1][missing:]",
    "in a later loop": "a = [x for x in range(3) for y in missing]",
    "in a condition": "a = [x for x in range(3) if missing]",
    "in a lambda": "f = lambda n: missing",
    "in a format": "print(f'{1:{missing}}')",
    "in a pattern": "match 1:\n    case missing.A:\n        pass",
    "in an asynchronous function": "async def f():\n    await missing",
    "behind a loop": "for n in missing:\n    pass",
    "in an else": "for n in []:\n    pass\nelse:\n    missing",
}  # fmt: skip


@pytest.mark.parametrize("program", PLAIN.values(), ids=PLAIN)
def test_a_plain_program_is_proved(program: str) -> None:
    assert words_of_plain_program(ast.parse(program), set()) is not None
    assert _undefined_names(ast.parse(program), set()) == []


@pytest.mark.parametrize("program", FAULTY.values(), ids=FAULTY)
def test_what_pyflakes_holds_against_a_program_is_never_proved(program: str) -> None:
    assert _undefined_names(ast.parse(program), set()) != []
    assert words_of_plain_program(ast.parse(program), set()) is None


@pytest.mark.parametrize(
    "program",
    ["from os import *\nprint(path)", "__all__ = ['a']\na = 1", "def f():\n    global n\n    n = 1\nf()\nprint(n)",
     "print(y := 3)", "x = " + "-" * 60 + "1", "class A:\n    pass", "if 1:\n    pass\n" + "elif 1:\n    pass\n" * 60],
    ids=ascii,
)  # fmt: skip
def test_what_is_not_followed_proves_nothing(program: str) -> None:
    assert words_of_plain_program(ast.parse(program), set()) is None


def test_given_names_are_defined() -> None:
    tree = ast.parse("def f(n: List) -> int:\n    return sqrt(n)")
    assert words_of_plain_program(tree, {"List"}) is None
    assert words_of_plain_program(tree, {"List", "sqrt"}) is not None


NAMES = st.sampled_from(["a", "b", "c", "max"])
SIMPLE = st.builds(
    str.format,
    st.sampled_from(
        ["{0} = 1", "{0} = {1}", "{0} += {1}", "print({0})", "{0} = [{1} for {1} in {2}]", "{0} = lambda {1}: {2}",
         "for {0} in {1}: pass", "try: {0}\nexcept ValueError as {1}: {2}", "import {0}", "with {0} as {1}: {2}",
         "{0}: {1} = {2}", "del {0}", "global {0}", "print({0} := {1})", "class {0}: {1} = {2}",
         "{0}.eval({1})", "from os import system as {0}", "import os as {0}", "getattr({0}, 'system')", "eval('{0}')",
         "{0} = {{**{1}, 'a': {2}}}", "print(f'{{{0}}}')", "{0}[{1}:{2}] = 3"]
    ),
    NAMES, NAMES, NAMES,
)  # fmt: skip
HEADS = st.builds(
    str.format, st.sampled_from(["def {0}({1}={2}):", "if {0}:", "for {0} in {1}:", "while {0}:"]), NAMES, NAMES, NAMES
)


def nested(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    block = st.lists(inner, min_size=1, max_size=3).map("\n".join)
    return st.builds(lambda head, body: f"{head}\n{indent(body, '    ')}", HEADS, block)


PROGRAMS = st.lists(st.recursive(SIMPLE, nested, max_leaves=6), max_size=8).map("\n".join)


@settings(max_examples=150, deadline=None)
@given(PROGRAMS)
def test_no_proof_differs_from_what_is_found_otherwise(program: str) -> None:
    words = words_of_plain_program(ast.parse(program), {"a", "b"})
    if words is not None:
        assert _undefined_names(ast.parse(program), {"a", "b"}) == []
        for forbidden in (frozenset({"eval", "os.system"}), frozenset({"os"})):
            assert may_use(words, forbidden) or find_forbidden(ast.parse(program), forbidden) == []


@pytest.mark.parametrize(
    ("program", "used"),
    [("import os as o\no.system('a')", True), ("from os import system as s\ns('a')", True), ("import os", False),
     ("getattr(__import__('os'), 'system')('a')", True), ("x = 'os.system'", True), ("print('system')", False),
     ("from importlib import import_module as i\ni('os').system('a')", True), ("x = 'a'.ossystem", True)],
)  # fmt: skip
def test_the_words_of_a_program_tell_what_it_may_use(program: str, used: bool) -> None:
    words = words_of_plain_program(ast.parse(program.replace(".ossystem", ".os.system")), set())
    assert words is not None
    assert may_use(words, ["os.system"]) is used
    assert not may_use(words, ["subprocess"])
