"""Wrong copies of a module: one text in one function replaced."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any


def mutant(module: ModuleType, function: str, original: str, replacement: str) -> Any:
    """A copy of `module` whose `function` (or class) has `original`, which occurs in it once, replaced.

    The copy is compiled anew, so its other functions call the mutated one. What other modules imported stays."""
    source, part = inspect.getsource(module), inspect.getsource(getattr(module, function))
    assert part.count(original) == 1, f"{original!r} occurs {part.count(original)} times in {function}"
    copy = ModuleType(module.__name__)
    exec(compile(source.replace(part, part.replace(original, replacement)), module.__file__ or "", "exec"), vars(copy))
    return copy
