"""The process that runs one user's reward function: `python -m grpo_engine.reward.custom_child PARENT FD`.

It imports nothing heavy, so it starts in the time of a bare Python. First message in: {"name", "source"}; out:
{"ready": [parameter names] or null for **kwargs} or {"error"}. Then per batch in: {"arguments", "count", "seed"}; out:
{"values": [[number or null, explanation, kind of fault or null] …]} or {"kind", "error"}.
"""

from __future__ import annotations

import inspect
import linecache
import math
import random
import socket
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from grpo_engine.lifeline import die_with_parent
from grpo_engine.reward.messages import PeerGone, receive, send

Function = Callable[..., Any]


class Unloadable(Exception):
    """The source does not hold a reward function that can be called; says why."""


def main(parent: int, descriptor: int) -> None:
    die_with_parent(parent)
    with socket.socket(fileno=descriptor) as connection:
        about = receive(connection)
        try:
            function = load_function(about["name"], about["source"])
        except Unloadable as error:
            send(connection, {"error": str(error)})
            return
        send(connection, {"ready": wanted(function)})
        while True:
            try:
                request = receive(connection)
            except PeerGone:
                return
            send(connection, answer(function, about["name"], request))


def answer(function: Function, name: str, request: dict[str, Any]) -> dict[str, Any]:
    """Values of one batch with their explanations, or what went wrong."""
    _seed(request["seed"])
    try:
        values = list(function(**request["arguments"]))
    except (Exception, SystemExit) as error:
        line = _last_line(error, name)
        kind = type(error).__name__ + (f" in line {line}" if line else "")
        return {"kind": kind, "error": f"{name} failed: {_describe(error, line)}"}
    if len(values) != request["count"]:
        fault = f"{name} returned {len(values)} values for {request['count']} completions"
        return {"kind": "wrong number of values", "error": fault}
    return {"values": [_as_value(name, value) for value in values]}


def _seed(seed: int) -> None:
    """Draws depend on the batch alone: equal batches get equal values, after a resume and in a replay too."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def wanted(function: Function) -> list[str] | None:
    """Names of its parameters; None when it takes **kwargs, and so everything."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return list(parameters)


# ---------------------------------------------------------------- the source
def load_function(name: str, source: str) -> Function:
    """The function named `reward`, else the only public one that the source defines. Raises Unloadable."""
    filename = f"<reward {name}>"
    module = ModuleType(f"cohort_reward_{name}")
    sys.modules[module.__name__] = module  # dataclasses and pickle look a class's module up
    # Tracebacks of the user's code then show its lines.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    try:
        exec(compile(source, filename, "exec"), module.__dict__)
    except SyntaxError as error:
        raise Unloadable(f"line {error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        raise Unloadable(f"it fails when it is loaded: {_describe(error, _last_line(error, name))}") from error
    return _choose(module)


def _choose(module: ModuleType) -> Function:
    own = {
        key: value
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
    }
    if "reward" in own:
        own = {"reward": own["reward"]}
    if len(own) != 1:
        found = ", ".join(sorted(own)) or "none"
        raise Unloadable(f"it must define one function, or one named 'reward'; found: {found}")
    [function] = own.values()
    if inspect.iscoroutinefunction(function):
        raise Unloadable(f"{function.__name__} is async; define it with plain def")
    return function


# ---------------------------------------------------------------- what it returned
def _as_value(name: str, value: Any) -> tuple[float | None, str, str | None]:
    """Number or None, the explanation, and the kind of fault where it is none that a reward may return."""
    if value is None:
        return None, f"{name} abstained.", None
    kind = f"{type(value).__name__} instead of a number"
    if isinstance(value, str | bytes):
        return None, f"{name} returned text instead of a number.", kind
    try:
        number = float(value)
    except Exception:  # the user's own class may do anything here
        return None, f"{name} returned a {kind}.", kind
    if math.isnan(number):
        return None, f"{name} returned NaN, which counts as an abstention.", "NaN"
    if math.isinf(number):
        return None, f"{name} returned an infinite number.", "infinite number"
    return number, f"{name} returned {number:.4g}.", None


def _describe(error: BaseException, line: int | None) -> str:
    """Kind and message of an error, with the last line of the user's source that it passed."""
    where = f" (line {line})" if line else ""
    try:
        message = str(error)[:300]
    except Exception:
        message = "its message cannot be shown"
    return f"{type(error).__name__}: {message}{where}"


def _last_line(error: BaseException, name: str) -> int | None:
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == f"<reward {name}>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _arguments(given: Sequence[str]) -> tuple[int, int]:
    parent, descriptor = map(int, given)
    return parent, descriptor


if __name__ == "__main__":
    main(*_arguments(sys.argv[1:]))
