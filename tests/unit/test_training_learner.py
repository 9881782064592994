from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from grpo_engine.config_training import KLConfig
from grpo_engine.errors import NonFinite
from grpo_engine.types import TrainRow, global_denominator
from tests.unit.training_fixtures import (
    POLICY,
    ThreadRanks,
    assert_close,
    assert_equal_bits,
    gradients,
    learner,
    masked_out,
    on_ranks,
    ragged_rows,
    tiny_llama,
    update,
    weights,
)

NO_KL = replace(POLICY, kl=KLConfig(weight=0.0, track=False))


def test_the_loss_is_the_one_that_was_differentiated_and_the_sum_of_its_parts() -> None:
    rows = ragged_rows()
    trainer = learner(tiny_llama(), replace(POLICY, normalizer=replace(POLICY.normalizer, kind="sequences")))
    stats = update(trainer, rows, trainer._objective.normalizer).stats
    assert stats["loss"] == pytest.approx(stats["loss/policy"] + stats["loss/kl"], rel=1e-12)
    doubled = learner(tiny_llama())
    doubled.accumulate(rows, 2 * global_denominator(rows))
    assert doubled.step().stats["loss"] == pytest.approx(update(learner(tiny_llama()), rows).stats["loss"] / 2)


def test_a_step_in_which_everything_is_masked_moves_nothing() -> None:
    model = tiny_llama()
    trainer, before = learner(model), weights(model)
    rows = masked_out(ragged_rows())
    trainer.accumulate(rows, global_denominator(rows))
    result = trainer.step()
    assert (result.applied, result.gradient_norm, result.stats) == (True, 0.0, {})
    assert_equal_bits(before, weights(model))


def test_a_step_without_rows_moves_nothing_after_others_did() -> None:
    model = tiny_llama()
    trainer = learner(model)
    update(trainer, ragged_rows())
    before = weights(model)
    assert trainer.step().applied
    assert_equal_bits(before, weights(model))


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_ratio_of_an_untouched_policy_is_exactly_one(kept: bool, dtype: str) -> None:
    trainer = learner(tiny_llama(dtype=torch.float32), dtype=dtype)
    rows = ragged_rows(20, kept=kept, loss_mask=None)
    rows = [replace(row, old_logprobs=own) for row, own in zip(rows, trainer.logprobs(rows), strict=True)]
    stats = update(trainer, rows).stats
    assert (stats["policy/ratio_mean"], stats["policy/ratio_max"]) == (1.0, 1.0)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_good_completion_becomes_likelier_and_a_bad_one_less(advantage: float) -> None:
    trainer = learner(tiny_llama(), NO_KL)
    row = TrainRow([4, 5], [6, 7, 8], advantage=advantage)
    before = trainer.logprobs([row])[0]
    update(trainer, [replace(row, rollout_logprobs=before)])
    assert (sum(trainer.logprobs([row])[0]) - sum(before)) * advantage > 0


def test_gradient_norm_is_reported_before_clipping_and_adam_sees_the_clipped_one(tmp_path: Path) -> None:
    model, rows = tiny_llama(), ragged_rows()
    trainer = learner(model, optimizer={"max_gradient_norm": 0.01, "beta1": 0.9})
    trainer.accumulate(rows, global_denominator(rows))
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients(model).values()))
    assert trainer.step().gradient_norm == pytest.approx(norm, rel=1e-9)
    trainer.save(tmp_path)
    means = [t for name, t in load_file(tmp_path / "optimizer.safetensors").items() if name.startswith("exp_avg.")]
    assert math.sqrt(sum(float(m.square().sum()) for m in means)) == pytest.approx(0.1 * 0.01, rel=1e-9)


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
    trainer = learner(model, NO_KL, optimizer={"learning_rate": 0.1, "weight_decay": 0.5})
    before = weights(model)
    update(trainer, ragged_rows(advantage=0.0))
    for name, weight in weights(model).items():
        torch.testing.assert_close(weight, before[name] * (0.95 if weight.ndim > 1 else 1.0), rtol=1e-12, atol=0)


def test_rates_follow_the_schedule_to_its_exact_end_through_skipped_steps() -> None:
    trainer = learner(tiny_llama(), optimizer={"schedule": "linear", "final_rate_share": 0.1}, num_steps=4)
    good, bad = ragged_rows(), ragged_rows(advantage=math.nan)
    rates = [update(trainer, rows).learning_rate for rows in (good, bad, good, good)]
    assert rates == pytest.approx([1e-2, 7e-3, 4e-3, 1e-3])
    assert rates[-1] == 1e-2 * 0.1


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_non_finite_steps_are_skipped_counted_and_finally_end_the_run(poison: float) -> None:
    model = tiny_llama()
    trainer = learner(model, optimizer={"max_skipped_steps": 2})
    good, bad, before = ragged_rows(), ragged_rows(advantage=poison), weights(model)
    for expected in (1, 2):
        assert not update(trainer, bad).applied
        assert (trainer.consecutive_skipped, trainer.policy_version) == (expected, 0)
    assert_equal_bits(before, weights(model))
    assert update(trainer, good).applied
    assert (trainer.skipped_steps, trainer.consecutive_skipped, trainer.policy_version) == (2, 0, 1)
    for _ in range(2):
        update(trainer, bad)
    with pytest.raises(NonFinite, match=r"3 steps in a row, more than optimizer\.max_skipped_steps = 2"):
        update(trainer, bad)


def test_nan_in_a_masked_token_does_not_reach_the_gradient() -> None:
    rows = [replace(row, loss_mask=[True] * (len(row.completion_ids) - 1) + [False]) for row in ragged_rows()]

    def poisoned(values: list[float] | None) -> list[float]:
        return [*(values or [])[:-1], math.nan]

    names = ("old_logprobs", "ref_logprobs", "rollout_logprobs")
    broken = [replace(row, **{name: poisoned(getattr(row, name)) for name in names}) for row in rows]
    models = tiny_llama(), tiny_llama()
    clean, found = (update(learner(model), part) for model, part in zip(models, (rows, broken), strict=True))
    assert found == clean
    assert_equal_bits(weights(models[0]), weights(models[1]))


def test_an_infinite_loss_is_skipped_though_its_gradient_is_finite() -> None:
    rows = [replace(row, ref_logprobs=[-math.inf] * len(row.completion_ids)) for row in ragged_rows()]
    result = update(learner(tiny_llama()), rows)
    assert math.isfinite(result.gradient_norm)
    assert (result.applied, result.stats["loss"]) == (False, math.inf)


# ---------------------------------------------------------------- ranks
def test_one_ranks_nan_skips_the_step_on_all() -> None:
    def work(ranks: ThreadRanks) -> tuple[bool, int, float]:
        trainer = learner(tiny_llama(), communicator=ranks)
        rows = ragged_rows(seed=ranks.rank, advantage=math.nan if ranks.rank == 1 else 1.0)
        trainer.accumulate(rows, 9.0)
        result = trainer.step()
        return result.applied, trainer.skipped_steps, result.learning_rate

    assert on_ranks(3, work) == [(False, 1, 1e-2)] * 3


def test_every_rank_raises_non_finite_at_the_same_step() -> None:
    def work(ranks: ThreadRanks) -> str:
        trainer = learner(tiny_llama(), communicator=ranks, optimizer={"max_skipped_steps": 0})
        trainer.accumulate(ragged_rows(advantage=math.nan if ranks.rank == 0 else 1.0), 9.0)
        with pytest.raises(NonFinite) as caught:
            trainer.step()
        return str(caught.value)

    assert len(set(on_ranks(2, work))) == 1


def test_ranks_keep_the_same_bits_and_report_the_same_numbers() -> None:
    def work(ranks: ThreadRanks) -> tuple[dict[str, torch.Tensor], list[object]]:
        model = tiny_llama(dtype=torch.float32)
        trainer = learner(model, communicator=ranks)
        results = []
        for seed in range(3):
            rows = ragged_rows(6, seed=seed)
            trainer.accumulate(rows[ranks.rank :: 3], global_denominator(rows))
            results.append(trainer.step())
        return weights(model), results

    (first, results), *others = on_ranks(3, work)
    for other, found in others:
        assert_equal_bits(first, other)
        assert found == results


def test_a_rank_without_rows_takes_part_and_moves_like_the_others() -> None:
    rows = ragged_rows()

    def work(ranks: ThreadRanks) -> tuple[dict[str, torch.Tensor], object]:
        model = tiny_llama()
        trainer = learner(model, communicator=ranks)
        if ranks.rank == 1:
            trainer.accumulate(rows, global_denominator(rows))
        result = trainer.step()
        return weights(model), result

    alone = tiny_llama()
    expected = update(learner(alone), rows)
    for moved, result in on_ranks(2, work):
        assert result == expected
        assert_close(moved, weights(alone), 1e-12)


# ---------------------------------------------------------------- refusals and the self-test's side door
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


def test_bfloat16_computes_under_autocast_over_float32_masters() -> None:
    model = tiny_llama(dtype=torch.float32)
    assert update(learner(model, dtype="bfloat16"), ragged_rows()).applied
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_discarded_gradient_leaves_its_numbers_and_nothing_else() -> None:
    model, rows = tiny_llama(), ragged_rows()
    trainer, before = learner(model), weights(model)
    trainer.accumulate(rows, global_denominator(rows))
    assert trainer.gradients().keys() == before.keys()
    stats = trainer.discard()
    assert trainer.gradients() == {}
    assert (trainer.schedule_step, trainer.policy_version) == (0, 0)
    assert update(trainer, rows).stats == stats | {"memory/micro_batch_tokens": 24.0}


@pytest.mark.parametrize("mode", ["full", "attention", "feed_forward"])
def test_gradient_checkpointing_changes_no_gradient(mode: str) -> None:
    rows = ragged_rows()
    models = tiny_llama(), tiny_llama()
    for model, checkpointing in zip(models, ("none", mode), strict=True):
        learner(model, memory={"gradient_checkpointing": checkpointing}).accumulate(rows, 20.0)
    assert_close(gradients(models[0]), gradients(models[1]), 1e-12)
