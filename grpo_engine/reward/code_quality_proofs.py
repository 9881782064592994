"""What one short walk over a plain program's syntax tree proves, so that nothing slower need be asked.

The walk binds and looks up names in pyflakes' order: function bodies after everything that stands around them. Whatever
it does not follow (classes, `global`, `del`, patterns, `:=`, star imports, annotations in quotes, deep nesting) and
every name that it does not find prove nothing, and pyflakes decides. So a proof never differs from its judgement.
"""

from __future__ import annotations

import ast
import builtins
from collections import deque
from collections.abc import Callable, Iterable, Set
from typing import Any

_MAX_DEPTH = 40
"""Deeper programs may be too deep for pyflakes too, which then judges them."""
_BUILTINS = frozenset(dir(builtins))
_TYPING = ("typing", "typing_extensions")


def words_of_plain_program(tree: ast.Module, given: Set[str]) -> list[str] | None:
    """Every name, attribute, module and text of a program whose names are all defined, with `given` as further
    builtins, as pyflakes sees it. None: that is not proved."""
    walk = _Walk(given)
    try:
        walk.statements(tree.body, 1)
        while walk.deferred:
            walk.run(*walk.deferred.popleft())
    except _UnclearError:
        return None
    return walk.words


def may_use(words: Iterable[str], forbidden: Iterable[str]) -> bool:
    """False: a program of these words uses none of the forbidden dotted names, under whatever name."""
    text = "\n".join(words)
    return any(all(part in text for part in name.split(".")) for name in forbidden)


class _UnclearError(Exception):
    """The walk does not follow this."""


class _Scope:
    """The names of the module, of a function or of a comprehension."""

    __slots__ = ("borrowed", "is_function", "names", "outer")

    def __init__(self, outer: _Scope | None, names: Iterable[str] = (), *, is_function: bool = False) -> None:
        self.outer = outer
        self.names = set(names)
        self.is_function = is_function
        self.borrowed: set[str] = set()
        """Of a function: names of outer scopes that it read. One of them that it sets later was read too early."""


class _Walk:
    """One pass; every method raises _UnclearError where nothing is proved."""

    def __init__(self, given: Set[str]) -> None:
        self.words: list[str] = []
        self.scope = _Scope(None, _BUILTINS | given)
        self.deferred: deque[tuple[ast.FunctionDef | ast.Lambda, _Scope, int]] = deque()
        self._typing: set[str] = set()  # names under which the program knows typing or what it has from there
        self._quotes_are_code = False  # within annotations

    def run(self, function: ast.FunctionDef | ast.Lambda, outer: _Scope, depth: int) -> None:
        """A function's body."""
        self.scope = _Scope(outer, [argument.arg for argument in _arguments(function)], is_function=True)
        if isinstance(function, ast.Lambda):
            self.visit(function.body, depth)
        else:
            self.statements(function.body, depth)

    def statements(self, body: Iterable[ast.stmt], depth: int) -> None:
        for statement in body:
            self.visit(statement, depth)

    def visit(self, node: Any, depth: int) -> None:
        handler = _HANDLERS.get(node.__class__)
        if handler is None or depth > _MAX_DEPTH:
            raise _UnclearError
        handler(self, node, depth + 1)

    def children(self, node: ast.AST, depth: int) -> None:
        for field in node._fields:
            value = getattr(node, field)
            if isinstance(value, list):
                for item in value:
                    if item is not None:  # a key of {**other}
                        self.visit(item, depth)
            elif isinstance(value, ast.AST):
                self.visit(value, depth)

    def nothing(self, node: ast.AST, depth: int) -> None:
        pass

    # ------------------------------------------------------------ names
    def name(self, node: ast.Name, depth: int) -> None:
        self.words.append(node.id)
        if isinstance(node.ctx, ast.Load):
            self.load(node.id)
        else:
            self.store(node.id)

    def load(self, name: str) -> None:
        scope: _Scope | None = self.scope
        passed: list[_Scope] = []
        while scope is not None and name not in scope.names:
            if scope.is_function:
                passed.append(scope)
            scope = scope.outer
        if scope is None:
            raise _UnclearError
        for function in passed:
            function.borrowed.add(name)

    def store(self, name: str) -> None:
        if name in self.scope.borrowed or name == "__all__":
            raise _UnclearError
        self.scope.names.add(name)

    def constant(self, node: ast.Constant, depth: int) -> None:
        if isinstance(node.value, str):
            if self._quotes_are_code:
                raise _UnclearError
            self.words.append(node.value)

    def attribute(self, node: ast.Attribute, depth: int) -> None:
        self.words.append(node.attr)
        self.visit(node.value, depth)

    def subscript(self, node: ast.Subscript, depth: int) -> None:
        self.visit(node.value, depth)
        self.annotation(node.slice, depth, quotes_are_code=self._quotes_are_code or self._is_typing(node.value))

    def call(self, node: ast.Call, depth: int) -> None:
        if self._is_typing(node.func):
            raise _UnclearError
        self.children(node, depth)

    def annotation(self, node: ast.expr | None, depth: int, *, quotes_are_code: bool = True) -> None:
        if node is not None:
            before, self._quotes_are_code = self._quotes_are_code, quotes_are_code
            self.visit(node, depth)
            self._quotes_are_code = before

    def _is_typing(self, node: ast.expr) -> bool:
        named = node.value if isinstance(node, ast.Attribute) else node
        return isinstance(named, ast.Name) and named.id in self._typing

    # ------------------------------------------------------------ scopes
    def function(self, node: ast.FunctionDef, depth: int) -> None:
        for decorator in node.decorator_list:
            self.visit(decorator, depth)
        for argument in _arguments(node):
            self.annotation(argument.annotation, depth)
        self.annotation(node.returns, depth)
        self.lambda_(node, depth)
        self.store(node.name)

    def lambda_(self, node: ast.FunctionDef | ast.Lambda, depth: int) -> None:
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default, depth)
        if self._quotes_are_code:
            raise _UnclearError
        self.deferred.append((node, self.scope, depth))

    def comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp, depth: int) -> None:
        before = self.scope
        self.visit(node.generators[0].iter, depth)
        self.scope = _Scope(before)
        for number, generator in enumerate(node.generators):
            if number:
                self.visit(generator.iter, depth)
            self.visit(generator.target, depth)
            for condition in generator.ifs:
                self.visit(condition, depth)
        for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.visit(part, depth)
        self.scope = before

    # ------------------------------------------------------------ statements
    def assign(self, node: ast.Assign, depth: int) -> None:
        self.visit(node.value, depth)
        for target in node.targets:
            self.visit(target, depth)

    def augmented(self, node: ast.AugAssign, depth: int) -> None:
        if isinstance(node.target, ast.Name):
            self.load(node.target.id)
        self.visit(node.value, depth)
        self.visit(node.target, depth)

    def annotated(self, node: ast.AnnAssign, depth: int) -> None:
        if node.value is None:
            raise _UnclearError
        self.annotation(node.annotation, depth)
        self.annotation(node.value, depth, quotes_are_code=self._is_typing(node.annotation))
        self.visit(node.target, depth)

    def for_(self, node: ast.For, depth: int) -> None:
        self.visit(node.iter, depth)
        self.visit(node.target, depth)
        self.statements(node.body, depth)
        self.statements(node.orelse, depth)

    def handler(self, node: ast.ExceptHandler, depth: int) -> None:
        """The exception's name is gone behind the handler."""
        is_new = node.name is not None and node.name not in self.scope.names
        if node.name is not None:
            self.store(node.name)
        self.children(node, depth)
        if is_new:
            self.scope.names.discard(str(node.name))

    def import_(self, node: ast.Import, depth: int) -> None:
        for alias in node.names:
            self.words.append(alias.name)
            self._bind_import(alias.asname or alias.name.split(".")[0], alias.name.split(".")[0])

    def import_from(self, node: ast.ImportFrom, depth: int) -> None:
        for alias in node.names:
            if alias.name == "*" or node.module == "__future__":
                raise _UnclearError
            self.words += (node.module or "", alias.name)
            self._bind_import(alias.asname or alias.name, node.module or "")

    def _bind_import(self, name: str, module: str) -> None:
        self.store(name)
        if module in _TYPING:
            self._typing.add(name)


def _arguments(function: ast.FunctionDef | ast.Lambda) -> list[ast.arg]:
    of = function.args
    wildcards = [argument for argument in (of.vararg, of.kwarg) if argument is not None]
    return [*of.posonlyargs, *of.args, *of.kwonlyargs, *wildcards]


_Handler = Callable[[_Walk, Any, int], None]
_HANDLERS: dict[type[ast.AST], _Handler] = {
    ast.Name: _Walk.name, ast.Constant: _Walk.constant, ast.Attribute: _Walk.attribute,
    ast.Subscript: _Walk.subscript, ast.Call: _Walk.call, ast.FunctionDef: _Walk.function,
    ast.Lambda: _Walk.lambda_, ast.ListComp: _Walk.comprehension, ast.SetComp: _Walk.comprehension,
    ast.DictComp: _Walk.comprehension, ast.GeneratorExp: _Walk.comprehension, ast.Assign: _Walk.assign,
    ast.AugAssign: _Walk.augmented, ast.AnnAssign: _Walk.annotated, ast.For: _Walk.for_,
    ast.ExceptHandler: _Walk.handler, ast.Import: _Walk.import_, ast.ImportFrom: _Walk.import_from,
    **dict.fromkeys(
        (
            ast.Expr, ast.Return, ast.If, ast.While, ast.Assert, ast.Raise, ast.With, ast.withitem, ast.Try,
            ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Compare, ast.keyword, ast.Starred, ast.Tuple, ast.List, ast.Set,
            ast.Dict, ast.IfExp, ast.Slice, ast.JoinedStr, ast.FormattedValue, ast.Yield, ast.YieldFrom,
        ),
        _Walk.children,
    ),
    **dict.fromkeys(
        (ast.Pass, ast.Break, ast.Continue, ast.Load, ast.Store, *ast.operator.__subclasses__(),
         *ast.boolop.__subclasses__(), *ast.unaryop.__subclasses__(), *ast.cmpop.__subclasses__()),
        _Walk.nothing,
    ),
}  # fmt: skip
