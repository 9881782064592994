"""Which servers a rank has and what those of its own are started with. Needs no vLLM."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_engine.config_rollout import VLLMServerRollout
from grpo_engine.errors import RolloutUnavailable
from grpo_engine.rollout.vllm import joining, options
from grpo_engine.rollout.vllm.joining import given_members, own_members, start_group

FAR = ["http://10.0.0.5:8000", "http://192.168.1.7:8000", "http://node7:8000", "http://localhost.example.org:8000"]
NEAR = ["http://localhost:8000", "http://127.0.0.1:8000", "http://127.8.0.1:8000", "http://[::1]:8000"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What groups were started with; no process is. This process has 8 threads to give."""
    calls = list[dict[str, Any]]()
    monkeypatch.setattr(joining, "ServerGroup", lambda argvs, **told: calls.append({"argvs": argvs, **told}))
    monkeypatch.setattr(options, "require_vllm", lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return calls


def start(folder: Path, device: str = "cpu", rank: int = 0, **fields: Any) -> None:
    start_group(
        VLLMServerRollout(**fields), folder, log_folder=folder, dtype="float32", device=torch.device(device),
        max_context_tokens=64, seed=5, rank=rank,
    )  # fmt: skip


# ---------------------------------------------------------------- servers given by address
@pytest.mark.parametrize("address", NEAR)
def test_servers_of_this_host_read_weights_from_memory(address: str) -> None:
    (member,) = given_members(VLLMServerRollout(addresses=[address]), rank=0, num_ranks=1)
    assert (member.client.address, member.process, member.ours_to_update) == (address, None, True)


@pytest.mark.parametrize("address", FAR)
def test_servers_elsewhere_need_a_folder_that_they_see(address: str) -> None:
    with pytest.raises(RolloutUnavailable, match=r"is on another host; set rollout\.weights_folder"):
        given_members(VLLMServerRollout(addresses=[NEAR[0], address]), rank=0, num_ranks=1)
    told = VLLMServerRollout(addresses=[address], weights_folder="/shared")
    assert [member.client.address for member in given_members(told, rank=0, num_ranks=1)] == [address]


def test_the_first_rank_of_those_that_share_a_server_updates_it() -> None:
    told = VLLMServerRollout(addresses=NEAR[:2])
    members = [given_members(told, rank=rank, num_ranks=3)[0] for rank in range(3)]
    assert [(NEAR.index(member.client.address), member.ours_to_update) for member in members] == [
        (0, True), (1, True), (0, False),
    ]  # fmt: skip


# ---------------------------------------------------------------- servers of our own
def test_our_own_servers_share_the_threads_and_log_apart(started: list[dict[str, Any]], tmp_path: Path) -> None:
    start(tmp_path, num_servers=3)
    (call,) = started
    assert len(call["argvs"]) == 3
    assert {"--seed=5", "--max-model-len=64", "--disable-uvicorn-access-log"} <= set(call["argvs"][2])
    assert (call["name"], call["log_folder"]) == ("vllm", tmp_path)
    told = {"OMP_NUM_THREADS": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    assert told.items() <= call["env"].items()
    assert "CUDA_VISIBLE_DEVICES" not in call["env"]


def test_more_servers_than_threads_have_one_each(started: list[dict[str, Any]], tmp_path: Path) -> None:
    start(tmp_path, num_servers=9)
    assert started[0]["env"]["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(("device", "index"), [("cuda:3", "3"), ("cuda", "0")])
def test_the_servers_of_a_rank_compute_on_its_gpu(
    started: list[dict[str, Any]], tmp_path: Path, device: str, index: str
) -> None:
    start(tmp_path, device)
    assert started[0]["env"]["CUDA_VISIBLE_DEVICES"] == index
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in started[0]["env"]


def test_logs_are_named_by_rank_where_there_are_several(
    started: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    start(tmp_path, rank=1)
    assert started[0]["name"] == "vllm-rank1"


def test_a_process_of_ours_goes_with_its_address() -> None:
    processes: list[Any] = [SimpleNamespace(address=f"unix:/s/{index}") for index in range(2)]
    group: Any = SimpleNamespace(processes=processes)
    members = own_members(group)
    assert [member.process for member in members] == processes
    assert [member.client.address for member in members] == ["unix:/s/0", "unix:/s/1"]
