"""How strongly a host can confine, and how a slot's server is started in each tier.

bubblewrap: namespaces of its own (files, processes, network, IPC) with Landlock, seccomp and limits inside them.
landlock: Landlock (ABI 4 or later), seccomp and limits; works in unprivileged containers. unsafe: seccomp and limits.
In each, as root, every role of every slot is a user of its own.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from grpo_engine.launch import LAUNCH_ID
from grpo_engine.reward.sandbox.inside import landlock, seccomp

Tier = Literal["bubblewrap", "landlock", "unsafe"]
TIERS: tuple[Tier, ...] = ("bubblewrap", "landlock")
"""Strongest first; `unsafe` only where a config asks for it."""
LEAST_LANDLOCK = 4
"""ABI that also knows TCP."""
FOLDER = "/job"
"""A program's folder inside bubblewrap."""

_INSIDE = Path(__file__).parent / "inside"
_START = "import sys; sys.path.insert(0, {root!r}); from inside.server import main; del sys.path[0]; main()"
_UIDS_PER_POOL = 512
_LIBRARIES = ("/lib64", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache")


@dataclass(frozen=True)
class Started:
    """A server that was just started."""

    process: subprocess.Popen[bytes]
    folder: Path | None
    """The slot's folder on this host, to be removed with it."""


def obstacle(tier: Tier) -> str:
    """Why this host cannot have the tier at all, as far as can be told without trying; empty when nothing speaks
    against it."""
    if not seccomp.supported():
        return f"no table of system calls for {os.uname().machine}"
    if tier == "bubblewrap":
        return "" if shutil.which("bwrap") else "bwrap is not installed"
    if tier == "landlock" and (abi := landlock_abi()) < LEAST_LANDLOCK:
        return f"the kernel's Landlock ABI is {abi}, {LEAST_LANDLOCK} is the least"
    return ""


def landlock_abi() -> int:
    """0 without Landlock."""
    return landlock.version(ctypes.CDLL(None, use_errno=True))


def bubblewrap_version() -> str:
    """Empty when it is not installed."""
    path = shutil.which("bwrap")
    if path is None:
        return ""
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return said.stdout.strip().removeprefix("bubblewrap ")


def start(tier: Tier, slot: int, control: int, folder_bytes: int) -> Started:
    """Start slot number `slot`'s server; `control` is its end of the socket. Raises OSError."""
    uids = _uids(slot)
    settings: dict[str, object] = {
        "control": control,
        "uids": uids,
        "landlock": tier != "unsafe" and landlock_abi() > 0,
        "read": [str(path) for path in readable()],
        "counts_user": uids is None and tier != "bubblewrap",
        "kept": [],
        "folder": FOLDER,
    }
    if tier == "bubblewrap":
        command = [*bubblewrap_command(folder_bytes), *_python(settings, Path("/"))]
        return Started(_popen(command, {}, [control]), None)
    folder = _folder(uids)
    home = os.open(sys.base_prefix, os.O_PATH)
    try:
        # By descriptor, so that a user who may not enter root's home still imports from a Python that lies there.
        settings |= {"folder": str(folder), "kept": [home]}
        command = _python(settings, _INSIDE.parent)
        return Started(_popen(command, {"PYTHONHOME": f"/proc/self/fd/{home}"}, [control, home]), folder)
    finally:
        os.close(home)


def readable() -> Iterator[Path]:
    """What a program may read: the standard library without site-packages, and the system's shared libraries."""
    for name in ("stdlib", "platstdlib"):
        for entry in sorted(Path(sysconfig.get_path(name, vars=_BASE)).iterdir()):
            if entry.name not in ("site-packages", "dist-packages"):
                yield entry
    yield from map(Path, _LIBRARIES)
    for folder in ("/lib", "/usr/lib"):
        yield from Path(folder).glob("*-linux-*")


_BASE = {"installed_base": sys.base_prefix, "base": sys.base_prefix, "platbase": sys.base_exec_prefix,
         "installed_platbase": sys.base_exec_prefix}  # fmt: skip


def _python(settings: dict[str, object], root: Path) -> list[str]:
    executable = os.path.realpath(sys.executable)
    return [executable, "-s", "-S", "-P", "-B", "-c", _START.format(root=str(root)), json.dumps(settings)]


def _popen(command: Sequence[str], more: dict[str, str], descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/nonexistent", "PYTHONHASHSEED": "0"}
    if LAUNCH_ID in os.environ:  # so that whoever ends the engine finds what it started
        environment[LAUNCH_ID] = os.environ[LAUNCH_ID]
    environment["MALLOC_ARENA_MAX"] = "2"  # else every thread takes 64 MiB of a program's address space
    return subprocess.Popen(
        command,
        env=environment | more,
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        cwd="/",
    )


def _uids(slot: int) -> list[int] | None:
    """Two users nobody else is, for the program and the tests of a slot; None where this process cannot change user."""
    if os.geteuid() != 0:
        return None
    first, last = 1_879_048_192, 2_147_352_575  # no system assigns these
    if not _is_mapped(last):
        first, last = 30_000, 59_999  # a container that has 65,536
    pools = (last - first) // _UIDS_PER_POOL
    here = os.stat("/proc/self/ns/pid").st_ino  # process numbers repeat from container to container, users may not
    base = first + (here * 4099 + os.getpid()) % pools * _UIDS_PER_POOL
    return [base + 2 * slot, base + 2 * slot + 1]


def _is_mapped(uid: int) -> bool:
    lines = [list(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(inside <= uid < inside + count for inside, _, count in lines)


def _folder(uids: list[int] | None) -> Path:
    """A folder that the program may fill and the server empties; nobody else may enter it."""
    above = Path(tempfile.mkdtemp(prefix="cohort-sandbox-"))
    folder = above / "job"
    above.chmod(0o711)
    folder.mkdir(mode=0o700)
    if uids is not None:
        os.chown(folder, 0, uids[0])
        folder.chmod(0o770)
    return folder


def bubblewrap_command(folder_bytes: int) -> list[str]:
    """Up to and with `--`. Raises FileNotFoundError."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise FileNotFoundError("bwrap is not installed")
    root = os.geteuid() == 0
    user = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_KILL"]
    command = [bwrap, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    command += user if root else ["--unshare-user"]
    command += ["--new-session", "--as-pid-1", "--hostname", "sandbox", "--proc", "/proc", "--dev", "/dev"]
    command += ["--dir", "/inside", "--ro-bind", str(_INSIDE), "/inside"]
    command += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for name in ("/usr", "/lib", "/lib64", "/bin"):
        command += _same(name)
    command += _mount_python()
    # The only place that can be written: what does not fit into it cannot be kept.
    command += ["--perms", "0777", "--size", str(folder_bytes), "--tmpfs", FOLDER, "--chdir", "/"]
    return [*command, "--"]


def _same(name: str) -> list[str]:
    path = Path(name)
    if path.is_symlink():
        return ["--symlink", os.readlink(path), name]
    return ["--ro-bind-try", name, name]


def _mount_python() -> list[str]:
    """The base interpreter at its own path, without what was installed into it; folders above it open to all."""
    base = Path(sys.base_prefix)
    command: list[str] = []
    if not base.is_relative_to("/usr"):
        for parent in [*reversed(base.parents)][1:]:
            command += ["--perms", "0755", "--dir", str(parent)]
        command += ["--ro-bind", str(base), str(base)]
    for name in ("site-packages", "dist-packages"):
        installed = Path(sysconfig.get_path("stdlib", vars=_BASE)) / name
        if installed.is_dir():
            command += ["--perms", "0755", "--tmpfs", str(installed)]
    return command
