from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_engine.errors import CheckpointInvalid, NonFinite
from grpo_engine.training.learner import TorchLearner
from grpo_engine.types import TrainRow, global_denominator
from tests.unit.training_fixtures import POLICY, assert_equal_bits, gradients, learner, ragged_rows, tiny_llama, weights


def gradient_of(calls: list[list[TrainRow]], **options: int) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Gradient and statistics after one accumulate call for each part of a step."""
    model = tiny_llama()
    denominator = global_denominator([row for rows in calls for row in rows])
    trainer = learner(model, **options)
    stats = [trainer.accumulate(rows, denominator) for rows in calls]
    return gradients(model), stats


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 5, 7, 64])
def test_micro_batch_size_changes_neither_gradient_nor_statistics(size: int) -> None:
    rows = ragged_rows()
    whole, (expected,) = gradient_of([rows], max_micro_batch_rows=7)
    split, (found,) = gradient_of([rows], max_micro_batch_rows=size)
    assert_close(whole, split)
    assert found == pytest.approx(expected, rel=1e-9)


def test_two_calls_equal_one() -> None:
    rows = ragged_rows()
    whole, _ = gradient_of([rows])
    parts, _ = gradient_of([rows[:2], rows[2:]])
    assert_close(whole, parts)


def test_row_order_and_pad_id_change_nothing() -> None:
    rows = ragged_rows()
    whole, _ = gradient_of([rows])
    shuffled, _ = gradient_of([random.Random(3).sample(rows, len(rows))], pad_token_id=7)
    assert_close(whole, shuffled)


def test_fully_masked_rows_add_nothing_but_leave_the_rest_alone() -> None:
    rows = ragged_rows()
    empty = [replace(row, loss_mask=[False] * len(row.completion_ids)) for row in ragged_rows(4, seed=5)]
    whole, (expected,) = gradient_of([rows])
    with_empty, (found,) = gradient_of([rows + empty])
    assert_close(whole, with_empty)
    assert found == pytest.approx(expected, rel=1e-9)


def test_a_step_in_which_everything_is_masked_moves_nothing() -> None:
    model = tiny_llama()
    trainer, before = learner(model), weights(model)
    rows = [replace(row, loss_mask=[False] * len(row.completion_ids)) for row in ragged_rows()]
    assert trainer.accumulate(rows, global_denominator(rows)) == {"loss": 0.0}
    result = trainer.step()
    assert (result.applied, result.gradient_norm) == (True, 0.0)
    assert_equal_bits(before, weights(model))


def test_nan_in_a_masked_token_does_not_reach_the_gradient() -> None:
    rows = ragged_rows(loss_mask=None)
    masked = [replace(row, loss_mask=[True] * (len(row.completion_ids) - 1) + [False]) for row in rows]

    def poisoned(values: list[float] | None) -> list[float]:
        return [*(values or [])[:-1], math.nan]

    broken = [
        replace(row, old_logprobs=poisoned(row.old_logprobs), ref_logprobs=poisoned(row.ref_logprobs)) for row in masked
    ]
    clean, (expected,) = gradient_of([masked])
    found, (stats,) = gradient_of([broken])
    assert_equal_bits(clean, found)
    assert stats == expected


@pytest.mark.parametrize("kept", [False, True])
def test_the_ratio_of_an_untouched_policy_is_exactly_one_in_float32(kept: bool) -> None:
    trainer = learner(tiny_llama(dtype=torch.float32))
    rows = ragged_rows(20, kept=kept, loss_mask=None)
    rows = [replace(row, old_logprobs=own) for row, own in zip(rows, trainer.logprobs(rows), strict=True)]
    assert trainer.accumulate(rows, global_denominator(rows))["policy/ratio_mean"] == 1.0


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_good_completion_becomes_likelier_and_a_bad_one_less(advantage: float) -> None:
    trainer = learner(tiny_llama(), replace(POLICY, kl_weight=0.0, track_kl=False))
    row = TrainRow([4, 5], [6, 7, 8], advantage=advantage)
    before = trainer.logprobs([row])[0]
    trainer.accumulate([replace(row, rollout_logprobs=before)], 3.0)
    trainer.step()
    assert (sum(trainer.logprobs([row])[0]) - sum(before)) * advantage > 0


def test_gradient_norm_is_reported_before_clipping_and_adam_sees_the_clipped_one(tmp_path: Path) -> None:
    model, rows = tiny_llama(), ragged_rows()
    trainer = learner(model, optimizer={"max_gradient_norm": 0.01, "beta1": 0.9})
    trainer.accumulate(rows, global_denominator(rows))
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients(model).values()))
    assert trainer.step().gradient_norm == pytest.approx(norm, rel=1e-9)
    trainer.save(tmp_path)
    means = [t for name, t in load_file(tmp_path / "optimizer.safetensors").items() if name.startswith("exp_avg.")]
    assert math.sqrt(sum(float(m.square().sum()) for m in means)) == pytest.approx(0.1 * 0.01, rel=1e-3)


def test_the_first_adam_step_moves_each_weight_by_the_rate() -> None:
    model, rows = tiny_llama(), ragged_rows()
    trainer, before = learner(model, optimizer={"learning_rate": 1e-3, "epsilon": 1e-30}), weights(model)
    trainer.accumulate(rows, global_denominator(rows))
    sign = {name: g.sign() for name, g in gradients(model).items()}
    trainer.step()
    for name, weight in weights(model).items():
        torch.testing.assert_close(weight, before[name] - 1e-3 * sign[name], rtol=0, atol=1e-9)


def test_weight_decay_shrinks_matrices_and_leaves_norms_alone() -> None:
    model = tiny_llama()
    trainer = learner(model, replace(POLICY, kl_weight=0.0), optimizer={"learning_rate": 0.1, "weight_decay": 0.5})
    before = weights(model)
    rows = ragged_rows(advantage=0.0)
    trainer.accumulate(rows, global_denominator(rows))
    trainer.step()
    for name, weight in weights(model).items():
        torch.testing.assert_close(weight, before[name] * (0.95 if weight.ndim > 1 else 1.0), rtol=1e-12, atol=0)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_non_finite_steps_are_skipped_counted_and_finally_end_the_run(poison: float) -> None:
    model = tiny_llama()
    trainer = learner(model, optimizer={"max_skipped_steps": 2})
    good, bad, before = ragged_rows(), ragged_rows(advantage=poison), weights(model)
    for expected in (1, 2):
        trainer.accumulate(bad, 1.0)
        assert not trainer.step().applied
        assert (trainer.consecutive_skipped, trainer.policy_version) == (expected, 0)
    assert_equal_bits(before, weights(model))
    trainer.accumulate(good, 1.0)
    assert trainer.step().applied
    assert (trainer.skipped_steps, trainer.consecutive_skipped, trainer.policy_version) == (2, 0, 1)
    for _ in range(2):
        trainer.accumulate(bad, 1.0)
        trainer.step()
    trainer.accumulate(bad, 1.0)
    with pytest.raises(NonFinite, match=r"3 steps in a row, more than optimizer\.max_skipped_steps = 2"):
        trainer.step()


def train(trainer: TorchLearner, steps: range) -> None:
    for seed in steps:
        rows = ragged_rows(seed=seed, advantage=math.nan) if seed == 3 else ragged_rows(seed=seed)
        trainer.accumulate(rows, global_denominator(rows))
        trainer.step()


def fresh(seed: int) -> TorchLearner:
    options = {"warmup_steps": 2, "schedule": "cosine", "weight_decay": 0.1}
    return learner(tiny_llama(dtype=torch.float32, seed=seed), optimizer=options, num_steps=8)


@pytest.mark.parametrize("done", [0, 1, 4, 7])
def test_saving_and_continuing_equals_training_through_bit_for_bit(tmp_path: Path, done: int) -> None:
    through = fresh(0)
    train(through, range(8))
    first = fresh(0)
    train(first, range(done))
    first.save(tmp_path / "half")
    second = fresh(99)
    second.load(tmp_path / "half")
    assert_equal_bits(weights(first.model), weights(second.model))
    train(second, range(done, 8))
    for trainer, name in ((through, "a"), (second, "b")):
        trainer.save(tmp_path / name)
    for file in ("masters.safetensors", "optimizer.safetensors", "learner.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


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


def wrong_shape(folder: Path) -> None:
    tensors = load_file(folder / "masters.safetensors")
    save_file(tensors | {"lm_head.weight": torch.zeros(2, 2)}, folder / "masters.safetensors")


def lost_moment(folder: Path) -> None:
    tensors = load_file(folder / "optimizer.safetensors")
    tensors.pop("exp_avg_sq.lm_head.weight")
    save_file(tensors, folder / "optimizer.safetensors")


def extra_weight(folder: Path) -> None:
    tensors = load_file(folder / "masters.safetensors")
    save_file(tensors | {"head.bias": torch.zeros(2)}, folder / "masters.safetensors")


def old_format(folder: Path) -> None:
    (folder / "learner.json").write_text(json.dumps({"format": 0}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (wrong_shape, "lm_head.weight is torch.float32"),
        (lost_moment, "exp_avg_sq.lm_head.weight"),
        (extra_weight, "head.bias"),
        (old_format, "not of format 1"),
    ],
)
def test_state_of_another_model_changes_nothing(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    trainer = learner(tiny_llama())
    train(trainer, range(1))
    trainer.save(tmp_path)
    damage(tmp_path)
    other = learner(tiny_llama(seed=4))
    before = weights(other.model)
    with pytest.raises(CheckpointInvalid, match=message):
        other.load(tmp_path)
    assert_equal_bits(before, weights(other.model))


def test_bfloat16_computes_under_autocast_over_float32_masters() -> None:
    model, rows = tiny_llama(dtype=torch.float32), ragged_rows()
    trainer = learner(model, dtype="bfloat16")
    rows = [replace(row, old_logprobs=own) for row, own in zip(rows, trainer.logprobs(rows), strict=True)]
    stats = trainer.accumulate(rows, global_denominator(rows))
    assert stats["policy/ratio_mean"] == 1.0
    assert trainer.step().applied
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_bfloat16_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="masters must be float32"):
        learner(tiny_llama(dtype=torch.bfloat16))


@pytest.mark.parametrize("denominator", [0.0, -1.0, math.nan, math.inf])
def test_a_senseless_denominator_is_refused(denominator: float) -> None:
    with pytest.raises(ValueError, match="must be a positive number"):
        learner(tiny_llama()).accumulate(ragged_rows(), denominator)


def test_full_weights_name_every_parameter_in_full_shape() -> None:
    model = tiny_llama()
    assert_equal_bits(dict(learner(model).iter_full_weights()), weights(model))
