"""What a wrong program tries to be called right, as data: beside attacks.py, for the self-test and the tests.

Each is run against the tests of `checks_of(answer)`: two calls, one of which has an answer that no program can know.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Forgery:
    name: str
    program: str


def checks_of(answer: str) -> str:
    """Tests that only a program which reads them can pass: `guess()` must be "answer-" and 16 random digits."""
    return f"""
answer = "answer-{answer}"
try:
    guess = __program__("guess")
    __report__(guess() == answer, "guess() == " + answer)
    __report__(len(guess()) == 23 and guess()[:7] == answer[:7] and answer in [guess()], "again")
except Exception as error:
    __report__(False, repr(error))
assert answer
"""


_EQUAL = """class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __len__(self): return 23
    def __getitem__(self, key): return self
    def __bool__(self): return True
    def __contains__(self, other): return True
"""
_SEARCH = """import gc, sys
def found(text):
    at = text.find("answer-")
    while at >= 0:
        one = text[at:at + 23]
        if len(one) == 23 and all(c in "0123456789abcdef" for c in one[7:]): return one
        at = text.find("answer-", at + 1)
"""

FORGERIES = (
    Forgery("equality-overloading object", _EQUAL + "def guess(): return Any()"),
    Forgery(
        "walking frames",
        _SEARCH
        + """
def guess():
    frame = sys._getframe()
    while frame:
        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
            if one := found(repr(value)): return one
        frame = frame.f_back
""",
    ),
    Forgery(
        "sys.exit(0)",
        """
import sys
sys.exit(0)
""",
    ),
    Forgery(
        "its own memory",
        _SEARCH
        + """
import ctypes
def guess():
    start = id(object()) & ~0xfffff
    for page in range(start - (1 << 20), start + (1 << 20), 4096):
        if one := found(ctypes.string_at(page, 4096).decode("latin1")): return one
""",
    ),
    Forgery(
        "os._exit(0)",
        """
import os
os._exit(0)
""",
    ),
    Forgery(
        "os._exit(0) when called",
        """
import os
def guess(): os._exit(0)
""",
    ),
    Forgery(
        "sys.exit(0) when called",
        """
import sys
def guess(): sys.exit(0)
""",
    ),
    Forgery("raising StopIteration", "def guess(): raise StopIteration"),
    Forgery("raising GeneratorExit", "def guess(): raise GeneratorExit"),
    Forgery(
        "printing a verdict",
        """
print('passed', 'OK', '1.0')
print({'report': [True, 'all']})
def guess(): return 1
""",
    ),
    Forgery(
        "forging messages on every descriptor",
        """
import json, os, struct
def guess():
    for message in ({"report": [True, "x"]}, {"end": "done", "memory": False}, {"load": "loaded"}, {"value": True}):
        data = json.dumps(message).encode()
        for n in range(256):
            try: os.write(n, struct.pack("I", len(data)) + data)
            except OSError: pass
    return 1
""",
    ),
    Forgery(
        "patching the harness",
        """
import sys, builtins
for name, module in list(sys.modules.items()):
    for key in ("report", "examine", "describe", "encode", "decode", "send"):
        if name.startswith("inside") and hasattr(module, key): setattr(module, key, lambda *a, **k: True)
builtins.all = builtins.any = builtins.len = builtins.bool = lambda *a: True
def guess(): return 1
""",
    ),
    Forgery(
        "str with its own equality",
        """
class S(str):
    def __eq__(self, other): return True
    __hash__ = str.__hash__
def guess(): return S('answer-0000000000000000')
""",
    ),
    Forgery(
        "the tests' names",
        """
__report__ = lambda *a: True
answer = 1
def guess(): return __import__('__tests__').answer
""",
    ),
    Forgery(
        "objects of the collector",
        _SEARCH
        + """
def guess():
    for value in gc.get_objects():
        try:
            if one := found(repr(value)): return one
        except Exception: pass
""",
    ),
    Forgery(
        "a value without end",
        """
def guess():
    x = []
    x.append(x)
    return x
""",
    ),
    Forgery(
        "a generator without end",
        """
import itertools
def guess(): return itertools.repeat('answer-')
""",
    ),
    Forgery("a value that is too large", "def guess(): return 'answer-' * 10_000_000"),
    Forgery("a function of everything", _EQUAL + "def guess(): return Any"),
    Forgery(
        "broken replies",
        r"""
import os
def guess():
    for n in range(3, 64):
        try: os.write(n, b'\xff' * 64)
        except OSError: pass
    return 1
""",
    ),
    Forgery(
        "a reply of nested lists",
        """
import os, struct
def guess():
    data = b'{"value":' + b'[' * 100_000
    for n in range(3, 64):
        try: os.write(n, struct.pack('I', len(data)) + data)
        except OSError: pass
""",
    ),
    Forgery(
        "replies before questions",
        """
import json, os, struct, threading
def flood():
    data = json.dumps({'value': 'answer-'}).encode()
    while True:
        for n in range(3, 64):
            try: os.write(n, struct.pack('I', len(data)) + data)
            except OSError: pass
threading.Thread(target=flood, daemon=True).start()
def guess(): return 1
""",
    ),
    Forgery(
        "closing its pipes",
        """
import os
os.closerange(3, 256)
def guess(): return 1
""",
    ),
    Forgery(
        "never answering",
        """
import time
def guess(): time.sleep(60)
""",
    ),
)
