"""A run of the real engine with multi-token prediction heads: they learn, are kept, and never touch the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from grpo_engine.config import RunConfig
from grpo_engine.manifest import verify
from tests.engine_configs import rl_stage, sft_stage, tiny_config
from tests.engine_process import named, run_engine
from tests.unit.training_fixtures import assert_equal_bits

pytestmark = [pytest.mark.xdist_group("mtp"), pytest.mark.timeout(300)]

DRAFTS = {"backend": "torch", "drafts": {"kind": "mtp"}}


def config(depth: int = 2, rl_steps: int = 4, **changes: Any) -> RunConfig:
    stages = (
        sft_stage(num_steps=6, checkpoint={"every_steps": 6}),
        rl_stage(num_steps=rl_steps, checkpoint={"every_steps": 2, "keep_last": 9}),
    )
    return tiny_config(*stages, mtp={"depth": depth, "learning_rate": 3e-3}, **changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mtp") / "whole"
    assert run_engine(config(rollout=DRAFTS), folder) == 0
    return folder


def trainer_of(folder: Path, checkpoint: str = "1-rl-000004") -> Path:
    return folder / "checkpoints" / checkpoint / "trainer"


def test_heads_learn_in_both_stages_and_are_kept_beside_the_policy(whole: Path) -> None:
    losses = [event.values.get("mtp/loss_2") for event in named(whole, "metrics")]
    assert losses[0] is not None
    assert losses[5] is not None
    assert losses[5] < losses[0]
    manifest = verify(whole / "checkpoints" / "1-rl-000004")
    assert {"trainer/mtp/mtp.safetensors", "trainer/mtp/optimizer.safetensors"} < set(manifest.files)
    assert not [name for name in load_file(trainer_of(whole).parent / "model.safetensors") if "block" in name]


def test_a_resumed_run_ends_with_the_same_heads_and_policy(whole: Path, tmp_path: Path) -> None:
    resumed = tmp_path / "second"
    checkpoint = whole / "checkpoints" / "1-rl-000002"
    assert run_engine(config(rollout=DRAFTS), resumed, "--resume", str(checkpoint)) == 0
    for name in ("mtp/mtp.safetensors", "mtp/optimizer.safetensors", "masters.safetensors", "optimizer.safetensors"):
        assert (trainer_of(whole) / name).read_bytes() == (trainer_of(resumed) / name).read_bytes(), name


@pytest.mark.slow
def test_a_run_without_drafts_trains_the_same_policy_with_and_without_heads(tmp_path: Path) -> None:
    for name, depth in (("with", 1), ("without", 0)):
        assert run_engine(config(depth), tmp_path / name) == 0
    one, two = (trainer_of(tmp_path / name) for name in ("with", "without"))
    assert (one / "masters.safetensors").read_bytes() == (two / "masters.safetensors").read_bytes()
    assert (one / "optimizer.safetensors").read_bytes() == (two / "optimizer.safetensors").read_bytes()


@pytest.mark.slow
def test_a_new_run_on_a_checkpoint_begins_with_its_heads(whole: Path, tmp_path: Path) -> None:
    folder = whole / "checkpoints" / "1-rl-000004"
    frozen = tiny_config(
        sft_stage(num_steps=1, optimizer={"learning_rate": 1e-9}), model={"source": "folder", "path": str(folder)},
        mtp={"depth": 2, "learning_rate": 1e-30},
    )  # fmt: skip
    assert run_engine(frozen, tmp_path / "new") == 0
    kept, found = (
        load_file(trainer / "mtp" / "mtp.safetensors")
        for trainer in (trainer_of(whole), trainer_of(tmp_path / "new", "0-sft-000001"))
    )
    assert_equal_bits(kept, found)
