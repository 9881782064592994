from __future__ import annotations

import json
import os
import random
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_engine.config import AdditionData, RunConfig, SFTStage, TinyLlamaModel
from grpo_engine.errors import CheckpointInvalid, StorageFull
from grpo_engine.manifest import Manifest, manifest_sha256, total_bytes, verify
from grpo_engine.model.loading import Policy, load_policy
from grpo_engine.training import rng
from grpo_engine.training.checkpoint import (
    checkpoint_name,
    load_progress,
    remove_old,
    restore_rng,
    save_checkpoint,
)
from grpo_engine.training.learner import TorchLearner
from grpo_engine.types import StageProgress, global_denominator
from tests.unit.training_fixtures import assert_equal_bits, learner, ragged_rows, weights

MODEL = TinyLlamaModel(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=16, max_context_tokens=32)
CONFIG = RunConfig(name="addition, thinking", model=MODEL, stages=[SFTStage(data=AdditionData())])
PROGRESS = StageProgress(0, 3, 7, 2, 48, 999, {"smoothed": 0.1 + 0.2}, {"flat": [1, None]})


@pytest.fixture
def policy() -> Policy:
    return load_policy(MODEL, seed=1, dtype="float32", device=torch.device("cpu"))


@pytest.fixture
def trainer(policy: Policy) -> TorchLearner:
    trainer = learner(policy.model)
    rows = ragged_rows()
    trainer.accumulate(rows, global_denominator(rows))
    trainer.step()
    return trainer


@pytest.fixture
def save(policy: Policy, trainer: TorchLearner, tmp_path: Path) -> Callable[..., Manifest]:
    def save(name: str = "0-sft-000003", **changes: Any) -> Manifest:
        about: dict[str, Any] = {"progress": PROGRESS, "stage": "0-sft", "config": CONFIG, "parent": None}
        about |= {"metrics": {"loss": 0.5, "broken": float("nan")}, "reward_versions": {"accuracy": "accuracy@1f"}}
        return save_checkpoint(tmp_path / name, policy=policy, **({"learner": trainer} | about | changes))

    return save


def test_the_root_loads_with_from_pretrained_and_gives_equal_logits(
    save: Callable[..., Manifest], policy: Policy, tmp_path: Path
) -> None:
    save()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "0-sft-000003")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "0-sft-000003")
    ids = torch.tensor([policy.tokenizer("347+285=")["input_ids"]])
    assert tokenizer("347+285=")["input_ids"] == ids[0].tolist()
    assert torch.equal(model(ids).logits, policy.model(ids).logits)
    assert_equal_bits(weights(model), weights(policy.model))


def test_only_the_root_model_looks_like_weights_and_nothing_is_pickled(
    save: Callable[..., Manifest], tmp_path: Path
) -> None:
    save()
    folder = tmp_path / "0-sft-000003"
    suspicious = [path.name for path in folder.iterdir() if path.suffix in {".safetensors", ".bin", ".pt", ".pth"}]
    assert suspicious == ["model.safetensors"]
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} <= {".safetensors", ".json", ".md", ".jinja"}
    assert {"config.json", "generation_config.json", "tokenizer.json", "README.md"} <= set(os.listdir(folder))


def test_the_manifest_tells_where_the_checkpoint_comes_from(save: Callable[..., Manifest], tmp_path: Path) -> None:
    saved = save(parent="a" * 64)
    folder = tmp_path / "0-sft-000003"
    manifest = verify(folder)
    assert manifest == saved
    assert (manifest.stage, manifest.step, manifest.policy_version) == ("0-sft", 3, 7)
    assert manifest.config_hash == CONFIG.hash()
    assert manifest.metrics == {"loss": 0.5, "broken": None}
    assert manifest.package_versions["torch"] == torch.__version__
    assert total_bytes(folder) == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    card = (folder / "README.md").read_text()
    for fact in ("addition, thinking", "`0-sft`", "step 3", CONFIG.hash(), "a" * 64, "not finite"):
        assert fact in card


def test_progress_and_learner_come_back_exactly(
    save: Callable[..., Manifest], trainer: TorchLearner, tmp_path: Path
) -> None:
    save()
    assert load_progress(tmp_path / "0-sft-000003") == PROGRESS
    other = learner(load_policy(MODEL, seed=2, dtype="float32", device=torch.device("cpu")).model)
    other.load(tmp_path / "0-sft-000003" / "trainer")
    assert_equal_bits(weights(trainer.model), weights(other.model))
    assert (other.policy_version, other.schedule_step) == (1, 1)


def draw() -> list[float]:
    return [random.gauss(0, 1), float(np.random.standard_normal()), float(torch.randn(()))]


def test_every_random_generator_continues_where_it_was(save: Callable[..., Manifest], tmp_path: Path) -> None:
    draw()  # leaves a second Gaussian cached in Python and numpy
    save()
    expected = [draw(), draw()]
    load_progress(tmp_path / "0-sft-000003", rng=True)
    assert [draw(), draw()] == expected


def test_saving_draws_no_random_number(save: Callable[..., Manifest]) -> None:
    save("a")
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    expected = draw()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    save("b")
    assert draw() == expected


def test_without_random_state_restoring_it_is_refused(save: Callable[..., Manifest], tmp_path: Path) -> None:
    save(rng_states=[])
    with pytest.raises(CheckpointInvalid, match=r"rng\.json cannot be restored"):
        restore_rng(tmp_path / "0-sft-000003")


def test_each_rank_gets_its_own_random_state_back(save: Callable[..., Manifest], tmp_path: Path) -> None:
    states, expected = [], []
    for seed in range(3):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        states.append(rng.capture())
        expected.append(draw())
    save(rng_states=states)
    for rank in (2, 0, 1):
        restore_rng(tmp_path / "0-sft-000003", rank)
        assert draw() == expected[rank]
    with pytest.raises(CheckpointInvalid, match=r"rng-3\.json cannot be restored"):
        restore_rng(tmp_path / "0-sft-000003", 3)


def test_extra_files_lie_in_the_trainer_folder(save: Callable[..., Manifest], tmp_path: Path) -> None:
    (tmp_path / "reference").write_bytes(b"frozen")
    save(extra_files={"reference.safetensors": tmp_path / "reference"})
    assert (tmp_path / "0-sft-000003" / "trainer" / "reference.safetensors").read_bytes() == b"frozen"
    assert "trainer/reference.safetensors" in verify(tmp_path / "0-sft-000003").files


class Killed(BaseException):
    """Ends a save as a SIGKILL would: no clean-up runs."""


class DyingLearner:
    policy_version = 0

    def save(self, folder: Path) -> None:
        raise Killed


def test_a_kill_in_mid_write_leaves_no_checkpoint_and_the_next_save_cleans_up(
    save: Callable[..., Manifest], tmp_path: Path
) -> None:
    with pytest.raises(Killed):
        save(learner=DyingLearner())
    assert [path.name for path in tmp_path.iterdir()] == ["0-sft-000003.tmp"]
    save("0-sft-000004")
    assert [path.name for path in tmp_path.iterdir()] == ["0-sft-000004"]


def test_every_file_and_folder_is_synced_before_the_rename(
    save: Callable[..., Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    save()
    written = {str(path) for path in (tmp_path / "0-sft-000003").rglob("*")} | {str(tmp_path / "0-sft-000003")}
    assert {path.replace("0-sft-000003.tmp", "0-sft-000003") for path in synced[:-1]} == written
    assert synced[-1] == str(tmp_path)  # the rename itself


@pytest.fixture
def small_disk() -> Iterator[None]:
    """No file of this process may grow beyond 4 KiB: writes fail as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.usefixtures("small_disk")
def test_a_full_disk_is_storage_full_and_leaves_nothing_behind(save: Callable[..., Manifest], tmp_path: Path) -> None:
    with pytest.raises(StorageFull, match="0-sft-000003 cannot be written"):
        save()
    assert list(tmp_path.iterdir()) == []


def test_saving_twice_replaces_the_first(save: Callable[..., Manifest], tmp_path: Path) -> None:
    save()
    first = manifest_sha256(tmp_path / "0-sft-000003")
    save(metrics={"loss": 0.25})
    assert manifest_sha256(tmp_path / "0-sft-000003") != first
    assert verify(tmp_path / "0-sft-000003").metrics == {"loss": 0.25}
    assert [path.name for path in tmp_path.iterdir()] == ["0-sft-000003"]


@pytest.mark.parametrize("content", ["", "[]", '{"unknown": 1}', "{"])
def test_unreadable_progress_is_named(save: Callable[..., Manifest], tmp_path: Path, content: str) -> None:
    save()
    (tmp_path / "0-sft-000003" / "trainer" / "state.json").write_text(content)
    with pytest.raises(CheckpointInvalid, match=r"state\.json cannot be read"):
        load_progress(tmp_path / "0-sft-000003")


def test_retention_spares_what_is_protected(tmp_path: Path) -> None:
    names = [checkpoint_name("1-rl", step) for step in (10, 20, 30, 40)]
    fake_checkpoints(tmp_path, *names)
    assert remove_old(tmp_path, 1, "1-rl", {tmp_path / names[1]}) == [tmp_path / names[0], tmp_path / names[2]]


def fake_checkpoints(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir()
        (folder / name / "manifest.json").write_text(json.dumps({}))


@pytest.mark.parametrize(
    ("keep", "left"), [(1, [1000000]), (2, [30, 1000000]), (0, [1000000]), (9, [10, 20, 30, 1000000])]
)
def test_retention_keeps_the_newest_of_the_stage(tmp_path: Path, keep: int, left: list[int]) -> None:
    others = ["0-sft-000500", "11-rl-000010"]
    names = [checkpoint_name("1-rl", step) for step in (10, 20, 30, 1000000)]
    fake_checkpoints(tmp_path, *others, *names, "1-rl-000020.tmp")  # a kill in the midst of an earlier removal
    (tmp_path / "1-rl-000040").mkdir()  # no manifest: not a checkpoint, so it neither counts nor goes
    removed = remove_old(tmp_path, keep, "1-rl")
    kept = [checkpoint_name("1-rl", step) for step in left]
    assert removed == [tmp_path / name for name in names if name not in kept]
    assert sorted(os.listdir(tmp_path)) == sorted([*others, *kept, "1-rl-000040"])
