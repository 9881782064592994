"""The library of the C files beside, compiled for this machine's processor when it is first asked for.

A C compiler is used if there is one; without it, or where it fails, there is no library and decoding goes on with
matrix products, which are slower for small models (make bench-rollout, decode_in_c). Compiled once a machine: kept in
the user's cache folder under a name that tells source, flags, compiler and processor.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

log = logging.getLogger("cohort")
FOLDER = Path(__file__).parent
SOURCES = [FOLDER / "attend.c", FOLDER / "layer.c", FOLDER / "pick.c"]
FLAGS = (
    "-O3", "-march=native", "-shared", "-fPIC",
    # Sums may be split into lanes; NaN and infinity stay what they are.
    "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math", "-ffp-contract=fast",
)  # fmt: skip
COMPILE_SECONDS = 60
SWITCH = "COHORT_NATIVE"
"""Environment variable; 0 = matrix products only."""


@cache
def library() -> ctypes.CDLL | None:
    """None = decode with matrix products."""
    if os.environ.get(SWITCH) == "0":
        return None
    found = [path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))]
    compiler = shlex.split(os.environ.get("CC", "")) or found[:1]
    if not compiler:
        log.info("no C compiler was found: small models decode slower, with matrix products; gcc would do")
        return None
    try:
        return _loaded(compiler)
    except (OSError, subprocess.SubprocessError) as error:
        told = str(getattr(error, "stderr", None) or error).strip()[-500:]
        log.warning("the loops in C were not compiled, small models decode with matrix products: %s", told)
        return None


def _loaded(compiler: list[str]) -> ctypes.CDLL:
    told = [*compiler, "--version"]
    version = subprocess.run(told, capture_output=True, text=True, check=True, timeout=COMPILE_SECONDS).stdout
    texts = [file.read_text() for file in (*SOURCES, *sorted(FOLDER.glob("*.h")))]
    parts = (*texts, *FLAGS, *compiler, version, _processor())
    name = f"rollout-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.so"
    folder = _cache_folder()
    if folder is not None and (folder / name).exists():
        return _typed(folder / name)
    with tempfile.TemporaryDirectory(prefix="cohort-", dir=folder) as new:
        made = Path(new) / name
        command = [*compiler, *FLAGS, "-o", str(made), *map(str, SOURCES), "-lm"]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMPILE_SECONDS)
        if folder is not None:
            made = made.replace(folder / name)  # another process may have done the same
        return _typed(made)


def _typed(file: Path) -> ctypes.CDLL:
    loops = ctypes.CDLL(str(file))
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    loops.attend.argtypes = [pointer, count, count]
    loops.add_and_norm.argtypes = [*[pointer] * 4, count, count, ctypes.c_float]
    loops.rotate.argtypes = [*[pointer] * 3, *[count] * 3]
    loops.gate.argtypes = [pointer, pointer, count]
    loops.pick_tokens.argtypes = [pointer, count, count]
    for nothing in (loops.add_and_norm, loops.rotate, loops.gate, loops.pick_tokens):
        nothing.restype = None
    return loops


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _cache_folder() -> Path | None:
    """The user's; None where it cannot be written."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cohort"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return folder if os.access(folder, os.W_OK) else None
