"""The policy's weights as a file that vLLM servers read.

On one host it is a file without a name (memfd), reached as /proc/<pid>/fd/<n> by processes of the same user: it takes
memory once, needs no space in /dev/shm (64 MB in a container), and is gone with this process whatever ends it. Servers
on other hosts read from a folder that both see.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

TYPES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64", torch.bool: "BOOL",
    torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip
"""Names of the safetensors format."""


class WeightsFile:
    """One safetensors file: written once, read by any number of servers, removed by `close`."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]], *, dtype: str, folder: Path | None) -> None:
        """`dtype` float32 or bfloat16 is what floating-point tensors are written in. OSError when there is no room."""
        tensors = {name: _for_file(tensor, getattr(torch, dtype)) for name, tensor in weights}
        self._folder = folder
        if folder is None:
            self._descriptor = os.memfd_create("cohort-weights")
            self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        else:
            self.path = str(folder / f"cohort-weights-{uuid.uuid4().hex}.safetensors")
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._closed = False
        try:
            _write(self._descriptor, tensors)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Who has it open may read on; nobody can open it any more. May be called again."""
        if self._closed:
            return
        self._closed = True
        os.close(self._descriptor)
        if self._folder is not None:
            Path(self.path).unlink(missing_ok=True)


def _for_file(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """On the host, contiguous, without gradient; no copy of what already is."""
    kept = dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", kept).contiguous()


def _write(descriptor: int, tensors: Mapping[str, Tensor]) -> None:
    """The safetensors format: length of the header, header, tensors. The library's own writer renames a file into its
    place, which a file without a name has not, or needs all bytes in memory a second time."""
    header: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # what follows is aligned
    with open(descriptor, "wb", closefd=False) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.view(-1).view(torch.uint8).numpy().data)
