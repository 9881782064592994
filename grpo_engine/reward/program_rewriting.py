"""Which statements of a dataset's tests are cases, and how each is judged by itself.

A case is an assert (not of a constant, as `assert True`), a call of a function that asserts, or a try or with
statement, in the body that is rewritten and in its loops and branches. What else stands there prepares: it counts only
when it fails. Functions that the tests define stay as they are.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

_SHOWN_CHARACTERS = 120
_SETS_UP = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Delete, ast.Raise)
_ATOMS = (ast.Try, ast.TryStar, ast.With)
_NESTS = (ast.For, ast.While, ast.If, ast.Match)


class Rewriter:
    """Rewrites bodies of statements; `module` is where the functions stand that they may call."""

    def __init__(self, module: Iterable[ast.stmt]) -> None:
        self._asserting = _asserting(module)
        self._depth = 0
        self._num_cases = 0
        self._counted = True

    @property
    def num_cases(self) -> int | None:
        """Cases rewritten so far; None when only running tells how many there are."""
        return self._num_cases if self._counted else None

    def rewrite(self, body: list[ast.stmt]) -> list[ast.stmt]:
        return [new for statement in body for new in self._statement(statement)]

    def _statement(self, node: ast.stmt) -> list[ast.stmt]:
        case = ast.Constant(shown(node))
        if isinstance(node, ast.Assert):
            if isinstance(node.test, ast.Constant) and node.test.value:
                return [ast.Pass()]
            self._count()
            return _judged(node.test, case)
        if isinstance(node, _ATOMS) or (isinstance(node, ast.Expr) and _is_assertion(node.value, self._asserting)):
            self._count()
            return _guarded([node], case, "cohort_recorder.done()")
        if isinstance(node, _NESTS):
            self._nested(node)
            return _guarded([node], case)
        if isinstance(node, _SETS_UP) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            return _guarded([node], case)
        return [node]

    def _nested(self, node: ast.For | ast.While | ast.If | ast.Match) -> None:
        self._depth += 1
        if isinstance(node, ast.Match):
            for branch in node.cases:
                branch.body = self.rewrite(branch.body)
        else:
            node.body = self.rewrite(node.body)
            node.orelse = self.rewrite(node.orelse)
        self._depth -= 1

    def _count(self) -> None:
        self._num_cases += 1
        self._counted = self._counted and not self._depth


def shown(node: ast.stmt) -> str:
    """The statement for a sentence: its condition, call or first line, at most 120 characters."""
    part: ast.AST = node.test if isinstance(node, ast.Assert) else node
    if isinstance(part, ast.Compare) and _is_equality(part):
        part = _given_and_wanted(part)[0]
    text = ast.unparse(part).partition("\n")[0]
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"


def _is_equality(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)


def _given_and_wanted(test: ast.Compare) -> tuple[ast.expr, ast.expr]:
    """The side that calls something, and the other; the left one when both do or none."""
    left, right = test.left, test.comparators[0]
    calls = [any(isinstance(node, ast.Call) for node in ast.walk(side)) for side in (left, right)]
    return (right, left) if calls == [False, True] else (left, right)


def _judged(test: ast.expr, case: ast.Constant) -> list[ast.stmt]:
    """Both sides of an equality are kept, so that the page can say what came out."""
    if isinstance(test, ast.Compare) and _is_equality(test):
        given, wanted = _given_and_wanted(test)
        body = [_assigned("cohort_given", given), _assigned("cohort_wanted", wanted)]
        return _guarded(body, case, "cohort_recorder.compare(cohort_given, cohort_wanted, 0)")
    return _guarded([_assigned("cohort_given", test)], case, "cohort_recorder.judge(cohort_given, 0)")


def _assigned(name: str, value: ast.expr) -> ast.stmt:
    return ast.Assign([ast.Name(name, ast.Store())], value)


def _guarded(body: list[ast.stmt], case: ast.Constant, afterwards: str = "") -> list[ast.stmt]:
    """`body` in a try that tells the recorder; the 0 in a call of it stands for the case's text."""
    template = "try:\n    pass\nexcept Exception as cohort_error:\n    cohort_recorder.raised(cohort_error, 0)"
    [guard] = ast.parse(template + (f"\nelse:\n    {afterwards}" if afterwards else "")).body
    assert isinstance(guard, ast.Try)
    for statement in [*guard.handlers[0].body, *guard.orelse]:
        assert isinstance(statement, ast.Expr)
        assert isinstance(statement.value, ast.Call)
        arguments = statement.value.args
        arguments[:] = [case if isinstance(argument, ast.Constant) else argument for argument in arguments]
    guard.body = body
    return [guard]


def _asserting(module: Iterable[ast.stmt]) -> set[str]:
    """Names of the functions in it that assert, by themselves or through another of them."""
    functions = [
        node for statement in module for node in ast.walk(statement)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]  # fmt: skip
    found: set[str] = set()
    grown = True
    while grown:
        new = {function.name for function in functions if any(_asserts(node, found) for node in ast.walk(function))}
        grown = new != found
        found = new
    return found


def _asserts(node: ast.AST, functions: set[str]) -> bool:
    return isinstance(node, ast.Assert) or _is_assertion(node, functions)


def _is_assertion(node: ast.AST, functions: set[str]) -> bool:
    """A call of one of the functions, or of any that is named after asserting (unittest's and numpy's are)."""
    match node:
        case ast.Call(func=ast.Name(id=name)):
            return name in functions or name.startswith("assert")
        case ast.Call(func=ast.Attribute(attr=name)):
            return name.startswith("assert")
    return False
