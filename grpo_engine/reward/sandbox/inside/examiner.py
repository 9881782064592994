"""The tests' process: run the tests against proxies of the program and say what came of it, over a pipe of its own.

Of the program only plain values arrive, and handles that do nothing by themselves: a test that compares, counts or
iterates a handle gets a TypeError, so an object that calls itself equal to everything passes nothing.
"""

from __future__ import annotations

import builtins
import random
import types
from collections.abc import Callable
from typing import Any, NoReturn

from . import literals, wire
from .candidate import describe

_MAX_REPORTS = 10_000
_MAX_TEXT = 300
_MAX_CALLBACKS = 100_000
_SWALLOWED = (
    StopIteration,
    StopAsyncIteration,
)  # they end a loop of the tests early, which must not pass for a success


class ProgramGone(BaseException):
    """The program's process ended, or wrote what is no message. No `except Exception` of the tests takes it for one of
    the program's exceptions."""


def examine(source: bytes, requests: int, replies: int, verdict: int) -> None:
    """Write load, reports and end to `verdict`."""
    link = _Link(requests, replies)
    try:
        loaded = link.receive()
    except ProgramGone:
        wire.send(verdict, {"end": "gone"})
        return
    end = loaded.get("end")
    wire.send(verdict, {"load": str(end), "error": str(loaded.get("error", ""))[:_MAX_TEXT]})
    if end == "loaded":
        wire.send(verdict, _run(source, link, verdict))
    elif end not in ("compile_error", "exception", "exited", "memory"):
        wire.send(verdict, {"end": "gone"})


def _run(source: bytes, link: _Link, verdict: int) -> dict[str, Any]:
    left = [_MAX_REPORTS]

    def report(passed: bool, text: str = "") -> None:
        if left[0]:
            left[0] -= 1
            wire.send(verdict, {"report": [bool(passed), str(text)[:_MAX_TEXT]]})

    module = types.ModuleType("__tests__")
    module.__dict__.update(__builtins__=builtins, __program__=link.get, __report__=report)
    random.seed(0)
    try:
        exec(compile(source, "tests.py", "exec", dont_inherit=True), module.__dict__)
        link.ask("ping")
    except ProgramGone:
        return {"end": "gone"}
    except BaseException as error:
        return {"end": "broken", "error": describe(error), "influenced": link.influenced, "memory": link.memory}
    return {"end": "gone" if link.gone else "done", "memory": link.memory}


class _Link:
    """Questions to the program's process."""

    def __init__(self, requests: int, replies: int) -> None:
        self.gone = False
        self.memory = False
        """Whether the program's last exception was a MemoryError."""
        self.influenced = False
        """Whether anything of the program has reached the tests."""
        self._requests = requests
        self._replies = replies
        self._callbacks: list[Callable[..., Any]] = []
        self._num_called_back = 0

    def get(self, path: str) -> Any:
        """Proxy or value of a global of the program. Raises NameError or AttributeError."""
        return self._decode(self.ask("get", path)["value"])

    def call(self, number: int, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        written = [self._encode(item) for item in arguments]
        by_name = {name: self._encode(item) for name, item in named.items()}
        reply = self.ask("call", number, written, by_name)
        given = [*arguments, *named.values()]
        for at, after in dict(reply.get("changed") or {}).items():
            _replace(given[int(at)], self._decode(after))
        return self._decode(reply["value"])

    def attribute(self, number: int, name: str) -> Any:
        return self._decode(self.ask("attribute", number, name)["value"])

    def ask(self, *request: Any) -> dict[str, Any]:
        self._send(list(request))
        while "callback" in (reply := self.receive()):
            self._send(self._called_back(reply))
        self.influenced = True
        if "raise" in reply:
            self._raise(reply)
        if "value" not in reply:
            self._lost()
        return reply

    def receive(self) -> dict[str, Any]:
        """Raises ProgramGone."""
        try:
            message = wire.receive(self._replies)
        except wire.Closed:
            self._lost()
        if not isinstance(message, dict):
            self._lost()
        return message

    def _send(self, message: Any) -> None:
        try:
            wire.send(self._requests, message)
        except wire.Closed:
            self._lost()

    def _lost(self) -> NoReturn:
        self.gone = True
        raise ProgramGone

    def _raise(self, reply: dict[str, Any]) -> NoReturn:
        names, message = list(reply["raise"] or []), str(reply.get("message", ""))[:_MAX_TEXT]
        self.memory = "MemoryError" in names
        for name in names:
            kind = getattr(builtins, str(name), None)
            if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _SWALLOWED):
                try:
                    error = kind(message)
                except TypeError:  # such as UnicodeDecodeError, which wants more
                    continue
                raise error
            if kind in _SWALLOWED:
                break
        raise RuntimeError(message or "the program raised what is no Exception")

    def _called_back(self, message: dict[str, Any]) -> dict[str, Any]:
        self._num_called_back += 1
        if self._num_called_back > _MAX_CALLBACKS:
            self._lost()
        try:
            function = self._callbacks[message["callback"]]
            arguments = [self._decode(item) for item in message["arguments"]]
            named = {name: self._decode(item) for name, item in message["named"].items()}
            return {"result": self._encode(function(*arguments, **named)), "error": ""}
        except Exception as error:
            return {"result": None, "error": describe(error)}

    def _encode(self, value: Any) -> Any:
        return literals.encode(value, self._pass_on)

    def _pass_on(self, value: Any) -> Any:
        if isinstance(value, Handle):
            return ["h", value.__number__]
        if not callable(value):
            raise TypeError(f"the tests pass a {type(value).__name__}, which is not a plain value")
        self._callbacks.append(value)
        return ["k", len(self._callbacks) - 1]

    def _decode(self, data: Any) -> Any:
        try:
            return literals.decode(data, self._handle)
        except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ValueError("the program's value cannot be read") from error

    def _handle(self, data: Any) -> Handle:
        tag, number, name, _ = data
        if tag != "h":
            raise ValueError(f"unknown tag {tag!r}")
        return Handle(self, int(number), str(name)[:100])


class Handle:
    """An object of the program: it can be called, passed back and asked for attributes, nothing else."""

    __slots__ = ("__link__", "__name__", "__number__")
    __link__: _Link
    __number__: int

    def __init__(self, link: _Link, number: int, name: str) -> None:
        object.__setattr__(self, "__link__", link)
        object.__setattr__(self, "__number__", number)
        object.__setattr__(self, "__name__", name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.__link__.call(self.__number__, arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__link__.attribute(self.__number__, name)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        self._inert()

    def __eq__(self, other: object) -> bool:
        return False if other is None else self._inert()

    def __ne__(self, other: object) -> bool:
        return True if other is None else self._inert()

    def _inert(self, *_: Any) -> NoReturn:
        name = object.__getattribute__(self, "__name__")
        raise TypeError(f"the program returned a {name}, which is not a plain value")

    __hash__ = __bool__ = __len__ = __iter__ = __contains__ = _inert
    __getitem__ = __setitem__ = __delitem__ = __lt__ = __le__ = __gt__ = __ge__ = _inert
    __str__ = __repr__ = __format__ = __int__ = __float__ = __index__ = __complex__ = __bytes__ = _inert
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _inert
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __abs__ = __round__ = _inert
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = __enter__ = __exit__ = _inert


def _replace(given: Any, after: Any) -> None:
    """Do to the tests' own object what the program did to its copy of it."""
    if isinstance(given, (list, bytearray)) and isinstance(after, (list, bytearray)):
        given[:] = after
    elif isinstance(given, (dict, set)) and type(given) in (dict, set) and isinstance(after, type(given)):
        given.clear()
        given.update(after)
