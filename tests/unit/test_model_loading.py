"""Loading policies from a config."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_engine.checks.model_folder import inspect_model
from grpo_engine.checks.report import Report
from grpo_engine.config import FolderModel, TinyLlamaModel
from grpo_engine.errors import InvalidConfig, Problem
from grpo_engine.model.loading import Policy, clone_frozen, load_policy

CPU = torch.device("cpu")
TINY = TinyLlamaModel(hidden_size=16, num_layers=2, num_heads=2, intermediate_size=24, max_context_tokens=64)


def tiny(seed: int = 0) -> Policy:
    return load_policy(TINY, seed=seed, dtype="float32", device=CPU)


def load(folder: Path) -> Policy:
    return load_policy(FolderModel(path=str(folder)), seed=0, dtype="float32", device=CPU)


def same_weights(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    policy = tiny()
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    return tmp_path


def problem_of(folder: Path) -> Problem:
    with pytest.raises(InvalidConfig) as caught:
        load(folder)
    (problem,) = caught.value.problems
    assert problem.field == "model.path"
    assert str(folder) in problem.value
    return problem


def test_the_seed_alone_decides_the_weights() -> None:
    first = tiny(seed=3)
    torch.rand(7)
    assert same_weights(first.model, tiny(seed=3).model)
    assert not same_weights(first.model, tiny(seed=4).model)


def test_building_a_model_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    tiny()
    assert torch.equal(before, torch.get_rng_state())


def test_the_demo_model_has_the_width_and_spread_it_was_asked_for() -> None:
    policy = load_policy(TinyLlamaModel(), seed=0, dtype="float32", device=CPU)
    assert policy.model.lm_head.weight is policy.model.model.embed_tokens.weight
    assert sum(p.numel() for p in policy.model.parameters()) == 860_288
    assert policy.model.model.layers[0].mlp.up_proj.weight.std().item() == pytest.approx(0.05, rel=0.02)
    assert policy.max_context_tokens == 256


def test_a_saved_policy_loads_as_a_folder_with_the_same_weights(folder: Path) -> None:
    policy = load(folder)
    assert same_weights(policy.model, tiny().model)
    assert policy.model.training
    assert (policy.max_context_tokens, policy.end_token_ids) == (64, {2})
    assert policy.model.lm_head.weight is policy.model.model.embed_tokens.weight


def test_longrope_limits_the_context_to_its_short_form(folder: Path) -> None:
    """Beyond it a row's log-probabilities would depend on the longest row of its batch."""
    config = json.loads((folder / "config.json").read_text())
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16, **factors}
    (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    assert load(folder).max_context_tokens == 16
    shape, _ = inspect_model(FolderModel(path=str(folder)), Report())
    assert shape is not None
    assert shape.max_context_tokens == 16


def test_bfloat16_weights_are_loaded_as_float32_masters(folder: Path) -> None:
    tiny().model.to(torch.bfloat16).save_pretrained(folder)
    assert {p.dtype for p in load(folder).model.parameters()} == {torch.float32}


def test_end_tokens_of_generation_config_model_config_and_tokenizer_are_united(folder: Path) -> None:
    edit(folder / "generation_config.json", lambda old: {**old, "eos_token_id": [2, 4, 9999]})
    edit(folder / "config.json", lambda old: {**old, "eos_token_id": 7})
    assert load(folder).end_token_ids == {2, 4, 7}


def test_a_tokenizer_without_pad_token_pads_with_its_end_token(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", lambda old: {k: v for k, v in old.items() if k != "pad_token"})
    policy = load(folder)
    assert policy.tokenizer.pad_token_id == policy.tokenizer.eos_token_id
    assert len(policy.tokenizer) == 56


def test_a_folder_that_states_a_temperature_without_sampling_can_be_saved_again(folder: Path, tmp_path: Path) -> None:
    edit(folder / "generation_config.json", lambda config: {**config, "do_sample": False, "temperature": 0.6})
    load(folder).model.save_pretrained(tmp_path / "checkpoint")
    saved = json.loads((tmp_path / "checkpoint" / "generation_config.json").read_text())
    assert (saved["do_sample"], saved["temperature"]) == (True, 0.6)


def test_a_generation_config_that_nobody_could_save_is_named(folder: Path) -> None:
    edit(folder / "generation_config.json", lambda config: {**config, "early_stopping": True, "num_beams": 1})
    assert "generation_config.json is invalid" in problem_of(folder).message


def test_a_frozen_clone_shares_nothing_with_the_policy() -> None:
    policy = tiny()
    reference = clone_frozen(policy)
    with torch.no_grad():
        policy.model.lm_head.weight.add_(1)
    assert same_weights(reference, tiny().model)
    assert not reference.training
    assert not any(p.requires_grad for p in reference.parameters())
    assert all(p.requires_grad for p in policy.model.parameters())


# ---------------------------------------------------------------- what cannot be loaded
def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert "does not exist" in problem_of(tmp_path / "nowhere").message


def test_a_file_instead_of_a_folder_is_named(folder: Path) -> None:
    assert "not a folder" in problem_of(folder / "config.json").message


def test_an_empty_folder_has_no_config(tmp_path: Path) -> None:
    assert "no config.json (it is empty)" in problem_of(tmp_path).message


@pytest.mark.parametrize(
    ("remove", "expected"),
    [
        (["config.json"], "no config.json (it holds"),
        (["model.safetensors"], "no .safetensors file"),
        (["tokenizer.json", "tokenizer_config.json"], "no tokenizer"),
    ],
)
def test_each_missing_file_is_named_with_what_is_there(folder: Path, remove: list[str], expected: str) -> None:
    for name in remove:
        (folder / name).unlink()
    assert expected in problem_of(folder).message


def test_pickled_weights_are_not_read(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    problem = problem_of(folder)
    assert "no .safetensors file" in problem.message
    assert "pickled" in problem.remedy


def test_a_torn_config_is_named(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "lla')
    assert "config.json cannot be read" in problem_of(folder).message


def test_an_unknown_architecture_is_named(folder: Path) -> None:
    edit(folder / "config.json", lambda old: {**old, "model_type": "no_such_model"})
    assert "no_such_model" in problem_of(folder).message


def test_a_model_that_wants_to_run_its_own_code_is_refused(folder: Path) -> None:
    (folder / "own.py").write_text("raise SystemExit('this ran')")
    edit(
        folder / "config.json",
        lambda old: {**old, "model_type": "own", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}},
    )
    problem_of(folder)


def test_torn_weights_are_named(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "cannot be loaded" in problem_of(folder).message


def test_missing_tensors_are_refused_instead_of_drawn_at_random(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.1.mlp.up_proj.weight" in problem_of(folder).message


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(folder: Path) -> None:
    policy = tiny()
    policy.tokenizer.add_tokens(["extra"])
    policy.tokenizer.save_pretrained(folder)
    assert "57 tokens, the model only 56" in problem_of(folder).message


def edit(path: Path, change: Callable[[dict[str, object]], dict[str, object]]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
