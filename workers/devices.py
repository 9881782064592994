"""The devices of this host, and the lock that keeps two engines off one device."""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app.settings import Settings

NVIDIA_SMI_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Device:
    """Example: Device("cuda:0", "cuda", "NVIDIA H200", 150_754_820_096)."""

    id: str
    kind: str
    """cpu or cuda."""
    name: str
    memory_bytes: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def list_devices(settings: Settings) -> list[Device]:
    """What this worker offers: `worker_devices`, else all GPUs, else cpu:0. Raises ValueError naming a bad id."""
    gpus = {gpu.id: gpu for gpu in _list_gpus()}
    wanted = [name.strip() for name in settings.worker_devices.split(",") if name.strip()]
    if not wanted:
        return list(gpus.values()) or [_cpu("cpu:0")]
    return [_device(name, gpus) for name in wanted]


def _device(name: str, gpus: dict[str, Device]) -> Device:
    if re.fullmatch(r"cpu:\d+", name):
        return _cpu(name)
    if name in gpus:
        return gpus[name]
    found = ", ".join(gpus) or "no GPU"
    raise ValueError(f"COHORT_WORKER_DEVICES names {name!r}; this host has cpu:<number> and {found}")


def _cpu(name: str) -> Device:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    models = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return Device(name, "cpu", models[0] if models else platform.machine(), memory)


def _list_gpus() -> list[Device]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=NVIDIA_SMI_LIMIT_S, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return []
    return parse_nvidia_smi(output)


def parse_nvidia_smi(output: str) -> list[Device]:
    """Devices from lines such as `0, NVIDIA H200, 143771` (MiB)."""
    devices: list[Device] = []
    for line in output.splitlines():
        index, name, memory = (part.strip() for part in line.split(","))
        devices.append(Device(f"cuda:{index}", "cuda", name, int(memory) << 20 if memory.isdigit() else 0))
    return devices


def device_environment(devices: Sequence[str]) -> dict[str, str]:
    """What an engine's ranks see of the host: rank n finds the n-th claimed GPU as cuda:<LOCAL_RANK>."""
    environment = {"COHORT_DEVICES": ",".join(devices)}
    gpus = [device.partition(":")[2] for device in devices if device.startswith("cuda:")]
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # nvidia-smi's numbers; CUDA itself counts from the fastest
    return environment


class DeviceLocks:
    """Locks of the devices that nobody else on this host holds. Use as a context manager.

    The engine inherits the descriptors: a device stays locked until the last process that holds one has ended,
    whatever became of the worker.
    """

    def __init__(self, home: Path, devices: Iterable[str]) -> None:
        self._folder = home.resolve() / "locks"
        self._wanted = list(devices)
        self._held: dict[str, int] = {}

    def __enter__(self) -> DeviceLocks:
        self._folder.mkdir(parents=True, exist_ok=True)
        for device in self._wanted:
            descriptor = os.open(self._folder / f"{socket.gethostname()}-{device}.lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
            else:
                self._held[device] = descriptor
        return self

    def __exit__(self, *_: object) -> None:
        self.keep_only([])

    @property
    def devices(self) -> list[str]:
        return list(self._held)

    def keep_only(self, devices: Sequence[str]) -> None:
        """Give the others back."""
        for device in [held for held in self._held if held not in devices]:
            os.close(self._held.pop(device))

    def descriptors(self) -> list[int]:
        return list(self._held.values())
