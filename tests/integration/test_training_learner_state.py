from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from grpo_engine.config_training import LoraAdapter
from grpo_engine.errors import CheckpointInvalid
from grpo_engine.model.adapters import adapter_tensors, add_adapter
from grpo_engine.model.loading import Policy
from grpo_engine.training.learner import TorchLearner
from tests.unit.training_fixtures import assert_equal_bits, learner, ragged_rows, tiny_llama, update, weights

FILES = ("masters.safetensors", "optimizer.safetensors", "learner.json")
VALUE_FILES = ("value/value.safetensors", "value/optimizer.safetensors")
TOKENIZER = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
SETTINGS: dict[str, Any] = {"optimizer": {"warmup_steps": 2, "schedule": "cosine", "weight_decay": 0.1}, "num_steps": 8}


def train(trainer: TorchLearner, steps: range) -> None:
    """One update a step; step 3 is not finite and skipped."""
    for seed in steps:
        update(trainer, ragged_rows(seed=seed, advantage=math.nan) if seed == 3 else ragged_rows(seed=seed))


def fresh(seed: int, **options: Any) -> TorchLearner:
    return learner(tiny_llama(dtype=torch.float32, seed=seed), **(SETTINGS | options))


def files_of(trainer: TorchLearner, folder: Path) -> dict[str, bytes]:
    trainer.save(folder)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("done", [0, 1, 4, 7])
@pytest.mark.parametrize("value", [None, {"backbone": "copied", "warmup_steps": 2}, {"backbone": "shared"}])
def test_saving_and_continuing_equals_training_through_bit_for_bit(
    tmp_path: Path, done: int, value: dict[str, Any] | None
) -> None:
    options = {} if value is None else {"value": value}
    through, first, second = fresh(0, **options), fresh(0, **options), fresh(99, **options)
    train(through, range(8))
    train(first, range(done))
    first.save(tmp_path / "half")
    second.load(tmp_path / "half")
    assert_equal_bits(weights(first.model), weights(second.model))
    train(second, range(done, 8))
    expected, found = files_of(through, tmp_path / "a"), files_of(second, tmp_path / "b")
    assert set(expected) == {*FILES, *(() if value is None else VALUE_FILES)}
    assert [name for name in expected if expected[name] != found[name]] == []


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path: Path) -> None:
    trainer = learner(tiny_llama(tie_word_embeddings=True))
    train(trainer, range(2))
    trainer.save(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "masters.safetensors")
    other = learner(tiny_llama(seed=4, tie_word_embeddings=True))
    other.load(tmp_path)
    assert other.model.lm_head.weight is other.model.model.embed_tokens.weight
    assert_equal_bits(weights(trainer.model), weights(other.model))


def test_saving_between_accumulate_and_step_is_refused(tmp_path: Path) -> None:
    trainer = learner(tiny_llama())
    trainer.accumulate(ragged_rows(), 1.0)
    with pytest.raises(RuntimeError, match="would lose the accumulated gradient"):
        trainer.save(tmp_path)


# ---------------------------------------------------------------- rollback
@pytest.mark.parametrize("value", [None, {"backbone": "copied"}])
def test_a_rollback_restores_weights_and_moments_and_lets_counters_go_on(
    tmp_path: Path, value: dict[str, Any] | None
) -> None:
    trainer = fresh(0, **({} if value is None else {"value": value}))
    train(trainer, range(2))
    good = files_of(trainer, tmp_path / "good")
    train(trainer, range(2, 5))
    trainer.roll_back(tmp_path / "good", 0.5)
    now = files_of(trainer, tmp_path / "now")
    assert [name for name in good if good[name] != now[name]] == ["learner.json"]
    counters = (trainer.policy_version, trainer.schedule_step, trainer.skipped_steps, trainer.consecutive_skipped)
    assert counters == (4, 5, 1, 0)


def test_rate_factors_multiply_whatever_checkpoint_they_return_to_and_are_kept(tmp_path: Path) -> None:
    trainer, rows = fresh(0, optimizer={"learning_rate": 1e-3}), ragged_rows()
    trainer.save(tmp_path / "good")
    rates = [update(trainer, rows).learning_rate]
    for _ in range(2):
        trainer.roll_back(tmp_path / "good", 0.5)
        rates.append(update(trainer, rows).learning_rate)
    assert rates == [1e-3, 5e-4, 2.5e-4]
    trainer.save(tmp_path / "later")
    resumed = fresh(1, optimizer={"learning_rate": 1e-3})
    resumed.load(tmp_path / "later")
    assert update(resumed, rows).learning_rate == 2.5e-4


def test_a_lower_rate_moves_weights_less_after_a_rollback(tmp_path: Path) -> None:
    moved = []
    for factor in (1.0, 0.25):
        trainer, rows = learner(tiny_llama()), ragged_rows()
        trainer.save(tmp_path / str(factor))
        before = weights(trainer.model)
        trainer.roll_back(tmp_path / str(factor), factor)
        update(trainer, rows)
        moved.append(sum(float((w - before[n]).abs().sum()) for n, w in weights(trainer.model).items()))
    assert moved[1] == pytest.approx(moved[0] / 4, rel=1e-6)


def test_a_rollback_drops_what_was_accumulated(tmp_path: Path) -> None:
    trainer = fresh(0)
    trainer.save(tmp_path)
    trainer.accumulate(ragged_rows(), 1.0)
    trainer.roll_back(tmp_path, 0.5)
    assert trainer.gradients() == {}
    assert trainer.step().stats == {}


# ---------------------------------------------------------------- damage
def wrong_shape(folder: Path) -> None:
    tensors = load_file(folder / "masters.safetensors")
    save_file(tensors | {"lm_head.weight": torch.zeros(2, 2)}, folder / "masters.safetensors")


def lost_moment(folder: Path) -> None:
    tensors = load_file(folder / "optimizer.safetensors")
    tensors.pop("exp_avg_sq.lm_head.weight")
    save_file(tensors, folder / "optimizer.safetensors")


def small_moment(folder: Path) -> None:
    tensors = load_file(folder / "optimizer.safetensors")
    save_file(tensors | {"exp_avg_sq.lm_head.weight": torch.zeros(2)}, folder / "optimizer.safetensors")


def extra_weight(folder: Path) -> None:
    tensors = load_file(folder / "masters.safetensors")
    save_file(tensors | {"head.bias": torch.zeros(2)}, folder / "masters.safetensors")


def old_format(folder: Path) -> None:
    (folder / "learner.json").write_text(json.dumps({"format": 0}))


def no_critic(folder: Path) -> None:
    (folder / "value" / "value.safetensors").unlink()


def another_head(folder: Path) -> None:
    save_file({"head.weight": torch.zeros(1, 16)}, folder / "value" / "value.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (wrong_shape, "lm_head.weight is torch.float32"),
        (lost_moment, "exp_avg_sq.lm_head.weight"),
        (small_moment, r"exp_avg_sq of lm_head.weight has shape \(2,\)"),
        (extra_weight, "head.bias"),
        (old_format, "not of format 2"),
        (no_critic, "value.safetensors"),
        (another_head, "head.bias are in only one|head.bias"),
    ],
)
def test_state_of_another_model_changes_nothing(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    trainer = learner(tiny_llama(), value={"backbone": "shared"})
    train(trainer, range(1))
    trainer.save(tmp_path)
    damage(tmp_path)
    other = learner(tiny_llama(seed=4), value={"backbone": "shared"})
    before = weights(other.model)
    with pytest.raises(CheckpointInvalid, match=message):
        other.load(tmp_path)
    assert_equal_bits(before, weights(other.model))


# ---------------------------------------------------------------- adapter
def adapted(seed: int, **options: Any) -> TorchLearner:
    """Trains a LoRA adapter on a tiny Llama; the base is the same whatever the adapter's seed."""
    model = tiny_llama(dtype=torch.float32)
    policy = Policy(model, PreTrainedTokenizerFast(tokenizer_object=TOKENIZER), frozenset({1}), 64, model.device)
    add_adapter(policy, LoraAdapter(rank=2), seed)
    return learner(model, **(SETTINGS | options))


@pytest.mark.parametrize("value", [None, {"backbone": "copied"}])
def test_an_adapter_is_saved_alone_and_continues_bit_for_bit(tmp_path: Path, value: dict[str, Any] | None) -> None:
    options = {} if value is None else {"value": value}
    through, first, second = adapted(0, **options), adapted(0, **options), adapted(5, **options)
    train(through, range(5))
    train(first, range(2))
    first.save(tmp_path / "half")
    assert not (tmp_path / "half" / "masters.safetensors").exists()
    second.load(tmp_path / "half")
    train(second, range(2, 5))
    assert_equal_bits(weights(through.model), weights(second.model))
    assert files_of(through, tmp_path / "a") == files_of(second, tmp_path / "b")


def test_the_adapters_file_holds_its_tensors_under_pefts_names(tmp_path: Path) -> None:
    trainer = adapted(0)
    train(trainer, range(2))
    trainer.save(tmp_path)
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert_equal_bits(found, dict(adapter_tensors(trainer.model)))
    theirs = get_peft_model_state_dict(trainer.model, adapter_name="default")
    assert_equal_bits({name.removeprefix("base_model.model."): tensor for name, tensor in found.items()}, theirs)


def test_training_an_adapter_leaves_the_base_untouched_and_hands_out_merged_weights() -> None:
    trainer = adapted(0)
    base = {name: w for name, w in weights(trainer.model).items() if "lora_" not in name}
    plain = weights(tiny_llama(dtype=torch.float32))
    train(trainer, range(2))
    after = weights(trainer.model)
    assert_equal_bits(base, {name: after[name] for name in base})
    merged = dict(trainer.iter_full_weights())
    assert merged.keys() == plain.keys()
    assert not torch.equal(merged["model.layers.0.mlp.up_proj.weight"], plain["model.layers.0.mlp.up_proj.weight"])
    assert torch.equal(merged["lm_head.weight"], plain["lm_head.weight"])


def test_a_copied_critic_under_an_adapter_shares_the_frozen_base() -> None:
    trainer = adapted(0, value={"backbone": "copied"})
    assert trainer.value is not None
    ours = dict(trainer.model.named_parameters())
    theirs = dict(trainer.value.model.named_parameters())
    assert all((ours[name] is theirs[name]) == (not ours[name].requires_grad) for name in ours)
    before = weights(trainer.model)
    trainer.accumulate(ragged_rows(advantage=0.0), 20.0)
    assert {name.partition(".")[0] for name in trainer.gradients()} == {"model", "value"}
    trainer.step()
    after = weights(trainer.model)
    assert_equal_bits(*({n: w for n, w in each.items() if "lora_" not in n} for each in (before, after)))
