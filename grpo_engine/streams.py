"""Random streams named by integers and words, the same for ever. Torch-free.

Raw Philox output is part of NumPy's compatibility promise (NEP 19); the methods of `numpy.random.Generator` are not.
The 128-bit key is a BLAKE2b hash of the whole name, so that (1, 2) and (1, 2, 0), which `SeedSequence` would give the
same stream, have streams of their own.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt


def raw_stream(count: int, *name: int | str) -> npt.NDArray[np.uint64]:
    """The first `count` numbers, 0 .. 2^64 - 1, of the stream called `name`.

    Example: raw_stream(2, "addition", 0, 4411)
    """
    key = int.from_bytes(hashlib.blake2b(repr(name).encode(), digest_size=16).digest(), "big")
    numbers: npt.NDArray[np.uint64] = np.random.Philox(key=key).random_raw(count)
    return numbers


def uniforms(count: int, *name: int | str) -> npt.NDArray[np.float64]:
    """The first `count` floats in [0, 1) of the stream, 53 random bits each; a longer draw starts with the shorter."""
    return (raw_stream(count, *name) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(size: int, *name: int | str) -> npt.NDArray[np.int64]:
    """0 .. size - 1 in the stream's order."""
    return np.argsort(raw_stream(size, *name), kind="stable").astype(np.int64)
