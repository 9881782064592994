"""Weights as a file for servers: read by other processes, gone when it is closed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from grpo_engine.rollout.vllm.joining import share_of
from grpo_engine.rollout.vllm.weights_file import WeightsFile

WEIGHTS = {
    "a": torch.randn(3, 4).t(),
    "b": torch.arange(5),
    "c": torch.nn.Parameter(torch.ones(2)),
    "d": torch.tensor(2.5),
}


@pytest.mark.parametrize("in_memory", [True, False])
def test_what_was_written_is_read_and_gone_afterwards(tmp_path: Path, in_memory: bool) -> None:
    file = WeightsFile(WEIGHTS.items(), dtype="float32", folder=None if in_memory else tmp_path)
    read = load_file(file.path)
    assert all(torch.equal(read[name], tensor) for name, tensor in WEIGHTS.items())
    file.close()
    file.close()
    assert not Path(file.path).exists()
    assert list(tmp_path.iterdir()) == []


def test_floating_point_weights_are_written_in_the_type_that_servers_compute_in() -> None:
    file = WeightsFile(WEIGHTS.items(), dtype="bfloat16", folder=None)
    assert {name: tensor.dtype for name, tensor in load_file(file.path).items()} == {
        "a": torch.bfloat16, "b": torch.int64, "c": torch.bfloat16, "d": torch.bfloat16,
    }  # fmt: skip
    file.close()


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="complex64"):
        WeightsFile([("a", torch.ones(2, dtype=torch.complex64))], dtype="float32", folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("num_ranks", "shares"),
    [
        (1, [[("a", True), ("b", True), ("c", True)]]),
        (2, [[("a", True), ("c", True)], [("b", True)]]),
        (5, [[("a", True)], [("b", True)], [("c", True)], [("a", False)], [("b", False)]]),
    ],
)
def test_addresses_are_shared_out_to_ranks(num_ranks: int, shares: list[list[tuple[str, bool]]]) -> None:
    assert [share_of(["a", "b", "c"], rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)] == shares
