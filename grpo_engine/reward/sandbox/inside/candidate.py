"""The program's process: load it, then answer what the tests ask of it, in plain values only.

Whatever the program patches here is its own loss: the verdict is made elsewhere, and nothing here knows an answer.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Callable
from typing import Any

from . import literals, wire

_MAX_MESSAGE = 300


def serve(source: bytes, requests: int, replies: int) -> None:
    """Until the other end closes. Raises wire.Closed."""
    program = _Program(requests, replies)
    wire.send(replies, program.load(source))
    while True:
        reply = program.answer(wire.receive(requests))
        try:
            wire.send(replies, reply)
        except wire.TooLong as error:
            wire.send(replies, {"raise": ["ValueError"], "message": str(error)})


def load_module(source: bytes, name: str) -> types.ModuleType:
    """Run a program's source as the module `name`. Raises whatever it raises, SyntaxError or ValueError first."""
    module = types.ModuleType(name)
    module.__dict__["__builtins__"] = __builtins__
    sys.modules[name] = module
    sys.argv = ["program.py"]
    random.seed(0)
    exec(compile_source(source), module.__dict__)
    return module


def compile_source(source: bytes) -> types.CodeType:
    """Raises SyntaxError, ValueError (NUL bytes), RecursionError, MemoryError or OverflowError."""
    return compile(source, "program.py", "exec", dont_inherit=True)


def load_failure(error: BaseException) -> dict[str, str]:
    """How a program ended while it was loaded."""
    if isinstance(error, MemoryError):
        return {"end": "memory", "error": "MemoryError"}
    if isinstance(error, SystemExit):
        return {"end": "exited", "error": f"SystemExit: {error.code}"[:_MAX_MESSAGE]}
    return {"end": "exception", "error": describe(error)}


def describe(error: BaseException) -> str:
    """One line: name, message, line of the program."""
    line = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "program.py":
            line = trace.tb_lineno
        trace = trace.tb_next
    where = f" (line {line})" if line else ""
    text = error.msg if isinstance(error, SyntaxError) else _text(error)
    return f"{type(error).__name__}: {text}".rstrip(": ")[: _MAX_MESSAGE - 20] + where


class _Program:
    """What the tests may ask of the loaded program."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests = requests
        self._replies = replies
        self._objects: list[Any] = []
        self._module = types.ModuleType("program")

    def load(self, source: bytes) -> dict[str, str]:
        try:
            compile_source(source)
        except BaseException as error:
            return {"end": "compile_error", "error": describe(error)}
        try:
            self._module = load_module(source, "program")
        except BaseException as error:
            return load_failure(error)
        return {"end": "loaded"}

    def answer(self, request: list[Any]) -> dict[str, Any]:
        operation, *operands = request
        try:
            return self._operation(operation)(*operands)
        except wire.Closed:
            raise
        except BaseException as error:
            names = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
            return {"raise": names if isinstance(error, Exception) else [], "message": _text(error)}

    def _operation(self, name: str) -> Callable[..., dict[str, Any]]:
        known: dict[str, Callable[..., dict[str, Any]]] = {
            "get": self._get, "call": self._call, "attribute": self._attribute, "ping": self._ping,
        }  # fmt: skip
        return known[name]

    def _get(self, path: str) -> dict[str, Any]:
        first, *rest = path.split(".")
        if first not in self._module.__dict__:
            raise NameError(f"the program does not define {first}")
        return {"value": self._encode(functools.reduce(getattr, rest, self._module.__dict__[first]))}

    def _attribute(self, number: int, name: str) -> dict[str, Any]:
        return {"value": self._encode(getattr(self._objects[number], name))}

    def _ping(self) -> dict[str, Any]:
        return {"value": None}

    def _call(self, number: int, written: list[Any], named: dict[str, Any]) -> dict[str, Any]:
        arguments = [self._decode(item) for item in written]
        by_name = {name: self._decode(item) for name, item in named.items()}
        value = self._objects[number](*arguments, **by_name)
        reply: dict[str, Any] = {"value": self._encode(value)}
        before = [*written, *named.values()]
        changed = {}
        for at, argument in enumerate([*arguments, *by_name.values()]):
            if isinstance(argument, (list, dict, set, bytearray)):
                after = self._encode(argument)
                if after != before[at]:
                    changed[str(at)] = after
        return reply | {"changed": changed}

    def _encode(self, value: Any) -> Any:
        return literals.encode(value, self._keep)

    def _keep(self, value: Any) -> Any:
        self._objects.append(value)
        return ["h", len(self._objects) - 1, type(value).__name__, callable(value)]

    def _decode(self, data: Any) -> Any:
        return literals.decode(data, self._known)

    def _known(self, data: Any) -> Any:
        tag, number = data[0], data[1]
        return self._objects[number] if tag == "h" else functools.partial(self._ask_back, number)

    def _ask_back(self, number: int, *arguments: Any, **named: Any) -> Any:
        """A function that the tests passed is called in their process."""
        written = [self._encode(item) for item in arguments]
        by_name = {name: self._encode(item) for name, item in named.items()}
        wire.send(self._replies, {"callback": number, "arguments": written, "named": by_name})
        while "result" not in (message := wire.receive(self._requests)):
            wire.send(self._replies, self.answer(message))
        if message["error"]:
            raise RuntimeError(message["error"])
        return self._decode(message["result"])


def _text(error: BaseException) -> str:
    try:
        return str(error)[:_MAX_MESSAGE]
    except BaseException:
        return ""
