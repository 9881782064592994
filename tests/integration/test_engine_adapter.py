"""A LoRA run of the real engine: the adapter learns over stages, the base stays, resuming is exact."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from grpo_engine.manifest import verify
from tests.engine_configs import rl_stage, sft_stage, tiny_config
from tests.engine_process import named, run_engine
from tests.unit.training_fixtures import assert_equal_bits

pytestmark = pytest.mark.xdist_group("adapter")

CONFIG = tiny_config(
    sft_stage(num_steps=4, checkpoint={"every_steps": 4}),
    rl_stage(num_steps=6, kl={"weight": 0.01}, checkpoint={"every_steps": 2, "keep_last": 9}),
    adapter={"kind": "lora", "rank": 4, "alpha": 8},
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter") / "whole"
    assert run_engine(CONFIG, folder) == 0
    return folder


def test_every_checkpoint_is_whole_and_names_the_same_base(whole: Path) -> None:
    manifests = [verify(folder) for folder in sorted((whole / "checkpoints").iterdir())]
    assert [(m.stage, m.step) for m in manifests] == [("0-sft", 4), ("1-rl", 2), ("1-rl", 4), ("1-rl", 6)]
    assert len({manifest.adapter.base_sha256 for manifest in manifests if manifest.adapter}) == 1
    assert all("model.safetensors" not in manifest.files for manifest in manifests)


def test_kl_is_measured_to_the_adapter_that_the_stage_began_with(whole: Path) -> None:
    values = [event.values["policy/kl"] for event in named(whole, "metrics") if event.stage == "1-rl"]
    assert values[0] == 0
    assert values[-1] > 0
    first = whole / "checkpoints" / "0-sft-000004" / "trainer" / "adapter" / "adapter_model.safetensors"
    for step in (2, 6):
        kept = load_file(whole / "checkpoints" / f"1-rl-00000{step}" / "trainer" / "reference.safetensors")
        assert_equal_bits(kept, load_file(first))


def test_a_resumed_run_ends_with_the_same_adapter(whole: Path, tmp_path: Path) -> None:
    checkpoint = whole / "checkpoints" / "1-rl-000002"
    assert run_engine(CONFIG, tmp_path / "second", "--resume", str(checkpoint)) == 0
    for name in ("adapter/adapter_model.safetensors", "optimizer.safetensors", "rng.json", "reference.safetensors"):
        one, two = (
            folder / "checkpoints" / "1-rl-000006" / "trainer" / name for folder in (whole, tmp_path / "second")
        )
        assert one.read_bytes() == two.read_bytes(), name
