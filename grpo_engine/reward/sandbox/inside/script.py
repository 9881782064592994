"""A program's process that reads standard input and writes standard output, as `__main__`."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
from typing import NoReturn

from . import wire
from .candidate import compile_source, describe, load_failure, load_module


def run(source: bytes, verdict: int) -> NoReturn:
    """Run it and end the process; how it ended goes to `verdict` unless it ended by sys.exit or well."""
    try:
        compile_source(source)
    except BaseException as error:
        wire.send(verdict, {"end": "compile_error", "error": describe(error)})
        os._exit(1)
    status = _main(source, verdict)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    os._exit(status)


def _main(source: bytes, verdict: int) -> int:
    """What the interpreter does with a script: run it, wait for its threads, run what it registered for the end."""
    try:
        load_module(source, "__main__")
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        return 0
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        with contextlib.suppress(BaseException):
            traceback.print_exc()
        wire.send(verdict, load_failure(error))
        return 1
