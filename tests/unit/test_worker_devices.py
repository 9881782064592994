"""Devices of a host and the locks that keep two engines off one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.settings import Settings
from tests.waiting import wait_until
from workers.devices import Device, DeviceLocks, device_environment, list_devices, parse_nvidia_smi


def test_gpus_are_read_from_nvidia_smi() -> None:
    output = "0, NVIDIA H200, 143771\n1, NVIDIA H200, [N/A]\n"

    assert parse_nvidia_smi(output) == [
        Device("cuda:0", "cuda", "NVIDIA H200", 143771 << 20),
        Device("cuda:1", "cuda", "NVIDIA H200", 0),
    ]


def test_named_devices_are_offered_in_order() -> None:
    devices = list_devices(Settings(worker_devices="cpu:1, cpu:0"))

    assert [(device.id, device.kind) for device in devices] == [("cpu:1", "cpu"), ("cpu:0", "cpu")]
    assert devices[0].memory_bytes > 1 << 28


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="COHORT_WORKER_DEVICES names 'tpu:0'; this host has cpu:<number>"):
        list_devices(Settings(worker_devices="tpu:0"))


def test_each_rank_finds_its_own_gpu_under_its_local_rank() -> None:
    environment = device_environment(["cuda:2", "cuda:5"])

    assert environment["CUDA_VISIBLE_DEVICES"].split(",") == ["2", "5"]
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert device_environment(["cpu:0"]) == {"COHORT_DEVICES": "cpu:0"}


def test_a_locked_device_is_not_free_for_another(tmp_path: Path) -> None:
    with DeviceLocks(tmp_path, ["cpu:0", "cpu:1"]) as first:
        first.keep_only(["cpu:0"])
        with DeviceLocks(tmp_path, ["cpu:0", "cpu:1"]) as second:
            assert (first.devices, second.devices) == (["cpu:0"], ["cpu:1"])
    with DeviceLocks(tmp_path, ["cpu:0"]) as third:
        assert third.devices == ["cpu:0"]


def test_a_device_stays_locked_as_long_as_an_engine_lives(tmp_path: Path) -> None:
    with DeviceLocks(tmp_path, ["cpu:0"]) as locks:
        descriptors = locks.descriptors()
        engine = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=descriptors)
    with DeviceLocks(tmp_path, ["cpu:0"]) as locks:
        assert locks.devices == []

    engine.kill()
    engine.wait()
    assert engine.stdin is not None
    engine.stdin.close()
    wait_until(lambda: is_free(tmp_path), 5, "the lock went with the engine")


def is_free(home: Path) -> bool:
    with DeviceLocks(home, ["cpu:0"]) as locks:
        return locks.devices == ["cpu:0"]


def test_locks_leave_no_descriptor_open(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with DeviceLocks(tmp_path, ["cpu:0", "cpu:1"]), DeviceLocks(tmp_path, ["cpu:0"]):
        pass

    assert set(os.listdir("/proc/self/fd")) == before
