"""Forbidden calls in a program's syntax tree, whatever name they go by there. Nothing is run."""

from __future__ import annotations

import ast

_IMPORTERS = {"__import__", "importlib.import_module", "importlib.__import__"}
_GETATTR = "getattr"


def find_forbidden(tree: ast.Module, forbidden: frozenset[str]) -> list[str]:
    """The forbidden dotted names that the program uses, each once.

    A forbidden name stands for all below it too (`subprocess` forbids `subprocess.run`). Found under other names are
    imports with `as`, `from` imports, star imports, names that are assigned a function or module, `builtins.x`,
    `getattr(module, "x")` and modules imported by a call. A function that is passed on counts as called. A name that
    the program defines itself is its own. Whatever is put together at run time (`getattr(os, "sys" + "tem")`) is not
    seen: that is the sandbox's work.
    """
    names = _Names(tree)
    used = (found for node in ast.walk(tree) if (found := names.resolve(node)) is not None)
    return sorted({name for name in used if _is_forbidden(name, forbidden)} | names.star_uses(forbidden))


def _is_forbidden(name: str, forbidden: frozenset[str]) -> bool:
    if name in forbidden:
        return True
    parts = name.split(".")
    return any(".".join(parts[:length]) in forbidden for length in range(1, len(parts)))


class _Names:
    """What the names of a program stand for."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._meaning: dict[str, str] = {}  # name -> dotted name of what it stands for
        self._stars: set[str] = set()
        self._own: set[str] = set()
        assigned: list[tuple[str, ast.expr]] = []
        for node in ast.walk(tree):
            self._bind(node, assigned)
        self._own -= self._meaning.keys()
        for name, value in assigned:
            meaning = self.resolve(value)
            if meaning is not None:
                self._meaning[name] = meaning
                self._own.discard(name)
            elif name not in self._meaning:  # set anew later, it may still be called before
                self._own.add(name)

    def _bind(self, node: ast.AST, assigned: list[tuple[str, ast.expr]]) -> None:
        match node:
            case ast.Import():
                for alias in node.names:
                    self._meaning[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
            case ast.ImportFrom(module=str(module), level=0):
                self._stars |= {module for alias in node.names if alias.name == "*"}
                self._meaning |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in node.names}
            case ast.Assign(targets=targets, value=value):
                assigned += [(target.id, value) for target in targets if isinstance(target, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                assigned.append((name, value))
            case ast.NamedExpr(target=ast.Name(id=name), value=value):
                assigned.append((name, value))
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                self._own.add(node.name)
            case ast.arg():
                self._own.add(node.arg)

    def resolve(self, node: ast.AST) -> str | None:
        """The dotted name that an expression stands for; None where it is something else. Goes down without recursion:
        a chain of attributes may be long."""
        attributes: list[str] = []
        while True:
            match node:
                case ast.Attribute(value=value, attr=attribute):
                    attributes.append(attribute)
                    node = value
                case ast.Call(func=function, args=[module, ast.Constant(value=str(attribute)), *_]) if (
                    isinstance(function, ast.Name) and function.id == _GETATTR
                ):
                    attributes.append(attribute)
                    node = module
                case ast.Call(func=function, args=[ast.Constant(value=str(module_name)), *_]) if attributes:
                    importer = self._imported_by(function)
                    return ".".join([module_name, *reversed(attributes)]) if importer else None
                case ast.Name(id=name) if name not in self._own:
                    return self._join(name, attributes)
                case _:
                    return None

    def _imported_by(self, function: ast.expr) -> bool:
        if isinstance(function, ast.Name):
            return self._join(function.id, []) in _IMPORTERS
        match function:
            case ast.Attribute(value=ast.Name(id=module), attr=name):
                return self._join(module, [name]) in _IMPORTERS
        return False

    def _join(self, name: str, attributes: list[str]) -> str:
        dotted = ".".join([self._meaning.get(name, name), *reversed(attributes)])
        return dotted.removeprefix("builtins.").removeprefix("__builtins__.")

    def star_uses(self, forbidden: frozenset[str]) -> set[str]:
        """Forbidden names of modules that are imported with a star and used without their module."""
        if not self._stars:
            return set()
        names = {node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name)}
        used = {f"{module}.{name}" for module in self._stars for name in names - self._own}
        return {name for name in used if _is_forbidden(name, forbidden)}
