"""What a host is asked before a tier is tried, and whose users and folders a slot has."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
from pathlib import Path
from typing import cast

import pytest

from grpo_engine.reward.sandbox import tiers
from grpo_engine.reward.sandbox.inside import landlock


@pytest.mark.parametrize(("abi", "obstacle"), [(4, ""), (3, "the kernel's Landlock ABI is 3, 4 is the least")])
def test_a_landlock_that_does_not_know_tcp_is_too_old(abi: int, obstacle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "landlock_abi", lambda: abi)
    assert tiers.obstacle("landlock") == obstacle


@pytest.mark.parametrize(
    ("abi", "size", "files", "network", "scopes"),
    [(1, 8, 13, 0, 0), (2, 8, 14, 0, 0), (3, 8, 15, 0, 0), (4, 16, 15, 3, 0), (5, 16, 16, 3, 0), (6, 24, 16, 3, 3)],
)
def test_all_that_a_kernel_can_deny_is_denied(abi: int, size: int, files: int, network: int, scopes: int) -> None:
    asked: list[tuple[int, bytes]] = []

    class Kernel:
        def syscall(self, number: int, attributes: bytes | None, given: ctypes.c_size_t, flags: int) -> int:
            asked.append((given.value, attributes or b""))
            return 7 if attributes else abi

    assert landlock.ruleset(cast(ctypes.CDLL, Kernel()), []) == 7
    assert asked[1:] == [(size, struct.pack("QQQ", (1 << files) - 1, network, scopes))]


@pytest.mark.parametrize("mapped", [True, False])
def test_no_two_roles_of_any_slot_or_pool_are_one_user(mapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(tiers, "_is_mapped", lambda uid: mapped)
    found: list[int] = []
    for pid in (4711, 4712):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        found += [uid for slot in range(256) for uid in tiers._uids(slot) or []]
    assert len(set(found)) == len(found) == 1024
    assert min(found) >= 30_000
    assert mapped or max(found) < 65_536


def test_a_user_is_mapped_when_the_last_of_a_range_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: "0 100000 1000\n2000 200000 10\n")
    assert [tiers._is_mapped(uid) for uid in (999, 1000, 1999, 2000, 2009, 2010)] == [
        True,
        False,
        False,
        True,
        True,
        False,
    ]


def test_only_its_own_user_may_enter_a_slots_folder() -> None:
    uids = [os.geteuid(), os.geteuid()] if os.geteuid() else [30_000, 30_001]
    folders = [tiers._folder(uids if os.geteuid() == 0 else None), tiers._folder(None)]
    modes = [folder.stat().st_mode & 0o007 for folder in folders]
    groups = [folder.stat().st_gid for folder in folders]
    for folder in folders:
        shutil.rmtree(folder.parent)
    assert modes == [0, 0]
    assert groups[0] == (30_000 if os.geteuid() == 0 else groups[1])
