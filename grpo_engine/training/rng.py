"""Random state of every library, as JSON: Python, numpy (global generator), torch on CPU and on each CUDA device."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def capture() -> dict[str, Any]:
    """JSON values only; drawing nothing, so capturing does not disturb what follows."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached_gaussian = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, [int(key) for key in keys], int(position), int(has_gauss), float(cached_gaussian)],
        "torch_cpu": _encode(torch.get_rng_state()),
        "torch_cuda": [_encode(state) for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
    }


def restore(state: dict[str, Any]) -> None:
    """What `capture` returned. CUDA states are set for the devices that exist here."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached_gaussian = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached_gaussian))
    torch.set_rng_state(_decode(state["torch_cpu"]))
    for device, encoded in enumerate(state["torch_cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(_decode(encoded), device)


def _encode(state: Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
