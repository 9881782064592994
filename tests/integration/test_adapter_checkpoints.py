"""Checkpoints of a LoRA run: what they hold, resuming from them, merging them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from grpo_engine.__main__ import main
from grpo_engine.config import AdditionData, FolderModel, RunConfig, SFTStage, TinyLlamaModel
from grpo_engine.config_training import LoraAdapter
from grpo_engine.errors import CheckpointInvalid, InvalidConfig
from grpo_engine.manifest import read_manifest, verify
from grpo_engine.model.adapters import adapter_tensors, base_hash, read_adapter
from grpo_engine.model.loading import Policy, load_policy
from grpo_engine.resume import load_policy_for
from grpo_engine.training.checkpoint import save_checkpoint
from grpo_engine.types import StageProgress
from tests.unit.training_fixtures import assert_equal_bits, learner, ragged_rows, weights

TINY = TinyLlamaModel(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=16, max_context_tokens=32)
LORA = LoraAdapter(rank=2, alpha=5.5)
CPU = torch.device("cpu")
NAME = "0-sft-000003"


def config_of(model: Any, adapter: Any = LORA) -> RunConfig:
    return RunConfig(name="addition", model=model, adapter=adapter, stages=[SFTStage(data=AdditionData())], seed=5)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    policy = load_policy(TINY, seed=5, dtype="float32", device=CPU)
    policy.model.save_pretrained(tmp_path / "base")
    policy.tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def policy(base: Path) -> Policy:
    """Adapted, and trained for two steps."""
    return trained(config_of(FolderModel(path=str(base))))


def trained(config: RunConfig) -> Policy:
    policy = load_policy_for(config, None, CPU)
    trainer = learner(policy.model)
    for _ in range(2):
        trainer.accumulate(ragged_rows(), 20.0)
        trainer.step()
    return policy


def saved(policy: Policy, config: RunConfig, folder: Path) -> Path:
    save_checkpoint(
        folder, policy=policy, learner=learner(policy.model), progress=StageProgress(0, 3), stage="0-sft",
        config=config, parent=None, metrics={}, reward_versions={},
    )  # fmt: skip
    return folder


@pytest.fixture
def checkpoint(policy: Policy, base: Path, tmp_path: Path) -> Path:
    return saved(policy, config_of(FolderModel(path=str(base))), tmp_path / NAME)


def logprobs(model: PreTrainedModel | PeftModel) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.tensor([[3, 9, 14, 2, 6, 11]])).logits.log_softmax(-1)


def merge(checkpoint: Path, out: Path, *options: str) -> int:
    return main(["merge-checkpoint", str(checkpoint), "--out", str(out), *options])


def test_the_root_has_everything_but_weights_and_says_so_when_loaded(checkpoint: Path) -> None:
    names = {path.name for path in checkpoint.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "README.md", "manifest.json"} <= names
    assert not any(name.endswith((".safetensors", ".bin", ".pt")) for name in names)
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(checkpoint)
    with pytest.raises(InvalidConfig, match="without its base's weights; make a folder with weights"):
        load_policy(FolderModel(path=str(checkpoint)), seed=0, dtype="float32", device=CPU)
    assert AutoTokenizer.from_pretrained(checkpoint)("347+")["input_ids"]


def test_its_config_is_what_a_whole_checkpoint_would_have(checkpoint: Path, base: Path) -> None:
    assert json.loads((checkpoint / "config.json").read_bytes()) == json.loads((base / "config.json").read_bytes())
    generation = (checkpoint / "generation_config.json").read_bytes()
    assert generation == (base / "generation_config.json").read_bytes()


def test_peft_loads_the_adapter_onto_the_base(checkpoint: Path, base: Path, policy: Policy) -> None:
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), checkpoint / "trainer" / "adapter")
    assert torch.equal(logprobs(model), logprobs(policy.model))
    assert not torch.allclose(logprobs(model), logprobs(AutoModelForCausalLM.from_pretrained(base)), atol=1e-3)
    about = json.loads((checkpoint / "trainer" / "adapter" / "adapter_config.json").read_bytes())
    assert about["base_model_name_or_path"] == str(base)
    assert (about["r"], about["lora_alpha"], about["task_type"]) == (2, 5.5, "CAUSAL_LM")


def test_the_manifest_and_the_card_name_the_base_and_its_hash(checkpoint: Path, base: Path) -> None:
    adapter = verify(checkpoint).adapter
    digest = base_hash(load_policy(TINY, seed=5, dtype="float32", device=CPU).model)
    assert adapter is not None
    assert (adapter.base, adapter.base_sha256) == (str(base), digest)
    card = (checkpoint / "README.md").read_text()
    assert f"no weights of its base, {base} (SHA-256 `{digest}`)" in card
    assert "cohort checkpoint merge" in card


def test_the_base_of_a_tiny_llama_is_made_again(tmp_path: Path) -> None:
    config = config_of(TINY)
    policy = trained(config)
    folder = saved(policy, config, tmp_path / NAME)
    assert read_manifest(folder).adapter.base == "tiny_llama"
    assert merge(folder, tmp_path / "merged") == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(logprobs(merged), logprobs(policy.model), atol=1e-5)


# ---------------------------------------------------------------- resume
def test_a_resumed_policy_is_the_base_with_the_adapter_loaded_by_the_learner(
    checkpoint: Path, base: Path, policy: Policy
) -> None:
    resumed = load_policy_for(config_of(FolderModel(path=str(base))), checkpoint, CPU)
    learner(resumed.model).load(checkpoint / "trainer")
    assert_equal_bits(weights(resumed.model), weights(policy.model))
    assert resumed.base_sha256 == read_manifest(checkpoint).adapter.base_sha256


def test_a_changed_base_is_refused_with_both_hashes(checkpoint: Path, base: Path) -> None:
    expected = read_manifest(checkpoint).adapter.base_sha256
    other = load_policy(TINY, seed=6, dtype="float32", device=CPU).model
    other.save_pretrained(base)
    with pytest.raises(CheckpointInvalid) as caught:
        load_policy_for(config_of(FolderModel(path=str(base))), checkpoint, CPU)
    assert f"trained on {base} with SHA-256 {expected}, but {base} has {base_hash(other)}" in str(caught.value)


@pytest.mark.parametrize(
    ("adapter", "field", "message"),
    [
        (LoraAdapter(rank=4, alpha=5.5), "adapter.rank", "has 2; set it to 2"),
        (LoraAdapter(rank=2, alpha=6), "adapter.alpha", r"has 5\.5; set it to 5\.5"),
        ({"kind": "none"}, "adapter.kind", "holds an adapter without its base's weights"),
    ],
)
def test_another_adapter_than_the_checkpoints_is_refused(
    checkpoint: Path, base: Path, adapter: Any, field: str, message: str
) -> None:
    with pytest.raises(InvalidConfig, match=message) as caught:
        load_policy_for(config_of(FolderModel(path=str(base)), adapter), checkpoint, CPU)
    assert caught.value.problems[0].field == field


def test_an_adapter_does_not_go_on_from_whole_weights(tmp_path: Path) -> None:
    config = config_of(TINY, {"kind": "none"})
    policy = load_policy_for(config, None, CPU)
    folder = saved(policy, config, tmp_path / NAME)
    again = load_policy_for(config, folder, CPU)
    assert_equal_bits(weights(again.model), weights(policy.model))
    with pytest.raises(InvalidConfig, match="holds whole weights and no adapter"):
        load_policy_for(config_of(TINY), folder, CPU)


def test_an_unreadable_adapter_is_named(checkpoint: Path) -> None:
    folder = checkpoint / "trainer" / "adapter"
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (folder / name).write_bytes(b"torn")
        with pytest.raises(CheckpointInvalid, match="the adapter in"):
            read_adapter(folder)


# ---------------------------------------------------------------- merge
def test_a_merged_folder_loads_and_computes_as_the_adapted_policy(
    checkpoint: Path, policy: Policy, tmp_path: Path
) -> None:
    assert merge(checkpoint, tmp_path / "merged") == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(logprobs(model), logprobs(policy.model), atol=1e-5)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    again = load_policy(FolderModel(path=str(tmp_path / "merged")), seed=0, dtype="float32", device=CPU)
    assert again.end_token_ids == policy.end_token_ids
    assert "Merged weights" in (tmp_path / "merged" / "README.md").read_text()
    assert not list(tmp_path.glob("*.tmp"))


def test_merging_refuses_what_it_cannot_merge(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    assert merge(checkpoint, tmp_path / "there") == 1
    assert f"--out = {tmp_path / 'there'}: exists already" in capsys.readouterr().err
    (checkpoint / "trainer" / "adapter" / "adapter_model.safetensors").write_bytes(b"torn")
    assert merge(checkpoint, tmp_path / "new") == 1
    assert "adapter_model.safetensors has 4 bytes" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_merging_a_whole_checkpoint_says_that_there_is_no_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(TINY, {"kind": "none"})
    folder = saved(load_policy_for(config, None, CPU), config, tmp_path / NAME)
    assert merge(folder, tmp_path / "new") == 1
    assert "has no adapter to merge" in capsys.readouterr().err


def test_a_base_that_moved_is_found_by_option_and_checked(
    checkpoint: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.move(base, tmp_path / "moved")
    assert merge(checkpoint, tmp_path / "merged") == 1
    assert "--base tells where the base lies now" in capsys.readouterr().err
    assert merge(checkpoint, tmp_path / "merged", "--base", str(tmp_path / "moved")) == 0
    load_policy(TINY, seed=6, dtype="float32", device=CPU).model.save_pretrained(tmp_path / "moved")
    assert merge(checkpoint, tmp_path / "again", "--base", str(tmp_path / "moved")) == 1
    assert "its weights are others" in capsys.readouterr().err


def test_equal_adapters_have_equal_files(policy: Policy, base: Path, tmp_path: Path) -> None:
    config = config_of(FolderModel(path=str(base)))
    one, two = (saved(policy, config, tmp_path / name) / "trainer" / "adapter" for name in ("a-000001", "b-000001"))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    assert_equal_bits(read_adapter(one)[1], dict(adapter_tensors(policy.model)))
