"""Code quality: the completion's Python parses, uses no undefined name, stays simple and calls nothing forbidden."""

from __future__ import annotations

import ast
import sys
import warnings
from importlib import metadata

from grpo_engine.config_rewards import CodeQualityReward
from grpo_engine.reward import code_calls, extraction, programs
from grpo_engine.reward.code_calls import find_forbidden
from grpo_engine.reward.metric import Judgement, Metric
from grpo_engine.reward.programs import find_program
from grpo_engine.reward.versions import module_source, version_of
from grpo_engine.types import Completion, Prompt

MAX_CHARACTERS = 50_000
"""A longer program is not looked at and gets 0."""


def metric(config: CodeQualityReward) -> Metric:
    """0 when the program does not parse or uses a forbidden call, else the mean of two marks: 1 when every name is
    defined, and the share of functions that are not too complex. Nothing is run.

    Names that the prompt's column `prompt` imports or defines (as HumanEval's do) count as defined.
    """
    forbidden = frozenset(config.forbidden_calls)

    def judge(prompt: Prompt, completion: Completion) -> Judgement:
        opened = extraction.opens_thinking(prompt.text)
        found = find_program(config.extract, completion.text, thinking_opened=opened)
        if found.text is None:
            return Judgement(0.0, f"{found.reason}.")
        if len(found.text) > MAX_CHARACTERS:
            return Judgement(0.0, f"The program is longer than {MAX_CHARACTERS:,} characters.", found.span)
        given = _given_names(prompt.columns.get("prompt"))
        try:
            value, explanation = _judge(found.text, given, forbidden, config.max_complexity)
        except (RecursionError, MemoryError):
            value, explanation = 0.0, "The program is nested too deeply to be judged."
        return Judgement(value, explanation, found.span)

    return Metric(config.kind, config.weight, _version(), judge)


def _version() -> str:
    own = module_source(__file__, code_calls.__file__, programs.__file__, extraction.__file__)
    libraries = [metadata.version(name).encode() for name in ("pyflakes", "mccabe")]
    return version_of("code_quality", own, *libraries, f"{sys.version_info[0]}.{sys.version_info[1]}".encode())


def _judge(program: str, given: set[str], forbidden: frozenset[str], max_complexity: int) -> tuple[float, str]:
    try:
        tree = _parse(program)
    except (SyntaxError, ValueError) as error:
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        return 0.0, f"The program does not parse{line}: {message}."
    if not tree.body:
        return 0.0, "The program has no statement."
    if calls := find_forbidden(tree, forbidden):
        return 0.0, f"The program uses {', '.join(calls[:5])}, which is forbidden."
    undefined = _undefined_names(tree, given)
    complexities = _complexities(tree)
    complex_ = [name for name, complexity in complexities.items() if complexity >= max_complexity]
    simple_share = 1.0 - len(complex_) / len(complexities) if complexities else 1.0
    said = f"Undefined: {', '.join(undefined[:5])}." if undefined else "Every name is defined."
    said += f" Complexity of {max_complexity} or more: {', '.join(complex_[:5])}." if complex_ else " Simple enough."
    return (float(not undefined) + simple_share) / 2, f"The program parses. {said}"


def _parse(source: str) -> ast.Module:
    """Raises SyntaxError, ValueError (NUL bytes), RecursionError or MemoryError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as "\d" in a plain string
        return ast.parse(source)


def _undefined_names(tree: ast.Module, given: set[str]) -> list[str]:
    from pyflakes.checker import Checker
    from pyflakes.messages import UndefinedLocal, UndefinedName

    messages = Checker(tree, builtins=given).messages
    return sorted({str(said.message_args[0]) for said in messages if isinstance(said, UndefinedName | UndefinedLocal)})


def _complexities(tree: ast.Module) -> dict[str, int]:
    """McCabe 1976's number for each function, and for statements outside of functions that branch."""
    from mccabe import PathGraphingAstVisitor

    visitor = PathGraphingAstVisitor()
    visitor.preorder(tree, visitor)
    return {graph.entity: graph.complexity() for graph in visitor.graphs.values()}


def _given_names(code: object) -> set[str]:
    """Top-level names of the code that a prompt begins with; none where it does not parse."""
    if not isinstance(code, str) or len(code) > MAX_CHARACTERS or not ("import " in code or "def " in code):
        return set()
    for source in (code, f"{code.rstrip()}\n    pass\n"):
        try:
            return {name for node in _parse(source).body for name in _bound_names(node)}
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return set()


def _bound_names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).split(".")[0] for alias in node.names]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []
