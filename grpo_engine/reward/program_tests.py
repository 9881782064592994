"""Turn a dataset's tests into the source that the sandbox's tests process runs. Torch-free.

Nothing of the program is ever executed there: names that the tests leave open become proxies of the program's globals,
but for modules such as math, which no program may stand in for. `program_rewriting.py` says what counts as a case.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import takewhile
from pathlib import Path

from grpo_engine.errors import RewardError
from grpo_engine.reward import program_recorder
from grpo_engine.reward.program_rewriting import Rewriter

_RECORDER = Path(program_recorder.__file__).read_text()
_ENTRY = re.compile(r"[^\W\d]\w*(\(\))?(\.[^\W\d]\w*(\(\))?)*")
_KNOWN = {*dir(builtins), "__name__", "__file__", "__doc__"}
_MODULES = frozenset([
    "bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools",
    "json", "math", "operator", "random", "re", "statistics", "string",
])  # fmt: skip
"""Of the standard library, those that tests judge by."""


@dataclass(frozen=True, slots=True)
class CallCases:
    """Tests that are ready to be run against programs."""

    source: str
    """Of the tests' process."""
    num_cases: int | None
    """Cases in it; None when some stand in loops or branches, so that only running tells."""
    defines: str
    """The global that the tests use most: what a program must define."""
    preamble: str = ""
    """Imports and helpers that the dataset's prompt gives; the program finds them before its own first line."""
    opening: str = ""
    """The dataset's prompt as it stands, when it is code that a completion may just continue."""


def check_tests(test: str, entry_point: str, prompt: str = "", *, first_failure_ends: bool = True) -> CallCases:
    """Tests that are a module with check(candidate), as in HumanEval.

    Raises RewardError when it does not parse, has no such function, or when `entry_point` is neither a name nor a
    method such as Solution().add.
    """
    if not _ENTRY.fullmatch(entry_point):
        raise RewardError(f"column entry_point is {entry_point!r}; it must be a name such as add or Solution().add")
    module = _parse(test, "test")
    checks = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    if not checks or len(checks[-1].args.args) != 1:
        raise RewardError("column test defines no function check(candidate)")
    name = re.split(r"\W", entry_point, maxsplit=1)[0]
    opening, helpers = _helpers(prompt, name)
    given = [*helpers, *module.body]
    if any(name in _bound_by(node) for node in ast.walk(module)):
        raise RewardError(f"column test defines {name} itself, so that it would not test the program")
    optional, imports = _open_names(given)
    rewriter = Rewriter(given)
    checks[-1].body = rewriter.rewrite(checks[-1].body)
    _need_cases(rewriter, "test")
    names = {name: True} | {other: False for other in optional if other != name}
    source = _assembled([*imports, *given], ast.parse(f"check({entry_point})").body, names, first_failure_ends)
    preamble = ast.unparse(ast.Module(helpers, type_ignores=[])) + "\n" if helpers else ""
    return CallCases(source, rewriter.num_cases, name, preamble, opening)


def assert_tests(tests: Sequence[str], setup: str = "", *, first_failure_ends: bool = True) -> CallCases:
    """Tests that are a list of statements, most of them asserts, after `setup`, as in MBPP.

    Raises RewardError when one does not parse, or none asserts anything about a name of the program.
    """
    given = _parse(setup, "test_setup_code").body
    body = [statement for at, test in enumerate(tests) for statement in _parse(test, f"test_list[{at}]").body]
    names, imports = _open_names([*given, *body])
    if not names:
        raise RewardError("column test_list asks for nothing that the program defines")
    rewriter = Rewriter([*given, *body])
    body = rewriter.rewrite(body)
    _need_cases(rewriter, "test_list")
    star = any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in given)
    source = _assembled([*imports, *given], body, dict.fromkeys(names, not star), first_failure_ends)
    return CallCases(source, rewriter.num_cases, max(names, key=lambda name: names[name]))


def _parse(source: str, column: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RewardError(f"column {column} is no Python: {error}") from error


def _need_cases(rewriter: Rewriter, column: str) -> None:
    if rewriter.num_cases == 0:
        raise RewardError(f"column {column} holds no assert")


def _helpers(prompt: str, name: str) -> tuple[str, list[ast.stmt]]:
    """The prompt and its top-level statements but the definition of `name`; nothing when it is no code that defines it.

    A prompt that ends in a signature gets a body, as its docstring is one."""
    for source in (prompt, f"{prompt.rstrip()}\n    pass\n"):
        try:
            body = ast.parse(source).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        if any(getattr(node, "name", None) == name for node in body):
            return prompt, [node for node in body if getattr(node, "name", None) != name]
    return "", []


def _open_names(body: Sequence[ast.stmt]) -> tuple[Counter[str], list[ast.stmt]]:
    """Names that are read and bound nowhere in it, with how often; and imports of those that are modules, asked for
    nothing but what these have: a program's own `math.isclose` would decide over itself."""
    nodes = [node for statement in body for node in ast.walk(statement)]
    bound = {name for node in nodes for name in _bound_by(node)}
    asked_for = {id(node.value): node.attr for node in nodes if isinstance(node, ast.Attribute)}
    read = [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    found = Counter(node.id for node in read if node.id not in bound and node.id not in _KNOWN)
    modules = sorted(
        name
        for name in _MODULES & found.keys()
        if all(hasattr(import_module(name), asked_for.get(id(node), "")) for node in read if node.id == name)
    )
    for name in modules:
        del found[name]
    return found, [ast.Import([ast.alias(name)]) for name in modules]


def _bound_by(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            yield name
        case ast.MatchMapping(rest=str(name)):
            yield name
        case ast.alias(name=path, asname=asname):
            yield asname or path.partition(".")[0]


def _assembled(given: list[ast.stmt], body: list[ast.stmt], names: dict[str, bool], first_failure_ends: bool) -> str:
    """`names`: what becomes a proxy, and whether the tests end when the program does not define it.

    What needs no proxy runs before any is made, so that its failure is known to be the dataset's own."""
    given = [node for node in given if not (isinstance(node, ast.ImportFrom) and node.module == "__future__")]
    alone = list(takewhile(lambda node: _needs_none(node, names), given))
    guarded = ast.parse("try:\n    pass\nexcept CohortStop:\n    pass").body[0]
    assert isinstance(guarded, ast.Try)
    guarded.body = [*_bindings(names), *given[len(alone) :], *body]
    module = ast.fix_missing_locations(ast.Module([*alone, guarded], type_ignores=[]))
    recorder = f"cohort_recorder = CohortRecorder(__report__, {first_failure_ends})"
    return f"{_RECORDER}\n\n{recorder}\n{ast.unparse(module)}\ncohort_recorder.end()\n"


def _needs_none(node: ast.stmt, names: dict[str, bool]) -> bool:
    """Whether a statement runs without the proxies; a function's body does not run where it is defined."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return True
    return not any(isinstance(inner, ast.Name) and inner.id in names for inner in ast.walk(node))


def _bindings(names: dict[str, bool]) -> list[ast.stmt]:
    lines = []
    for name, needed in sorted(names.items()):
        otherwise = "cohort_recorder.missing(cohort_error)" if needed else "pass"
        # A star import of the tests may have given an optional name already.
        lines += ["try:", f"    {name} = {'' if needed else f'globals().get({name!r}) or '}__program__({name!r})"]
        lines += ["except NameError as cohort_error:", f"    {otherwise}"]
    return ast.parse("\n".join(lines)).body
