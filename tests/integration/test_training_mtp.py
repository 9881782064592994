from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo_engine.config_training import LoraAdapter
from grpo_engine.diagnostics.catalogue import info
from grpo_engine.errors import CheckpointInvalid
from grpo_engine.model.adapters import add_adapter
from grpo_engine.model.loading import Policy
from grpo_engine.model.logprobs import LogprobForward
from grpo_engine.model.mtp import CompletionSlots, MTPHeads, embedded
from grpo_engine.model.packing import collate
from grpo_engine.training.learner import TorchLearner
from grpo_engine.training.mtp import MTPTraining
from grpo_engine.training.objectives import SupervisedObjective
from grpo_engine.types import StepResult, TrainRow, global_denominator
from tests.unit.test_training_logprobs import gemma2
from tests.unit.tiny_models import TOKENIZER
from tests.unit.training_fixtures import (
    ONE_AT_A_TIME,
    ThreadRanks,
    assert_close,
    assert_equal_bits,
    learner,
    masked_out,
    on_ranks,
    ragged_rows,
    tiny_llama,
    update,
    weights,
)

SEED = 11
MTP_FILES = {"mtp/mtp.safetensors", "mtp/optimizer.safetensors"}


def with_heads(
    model: Any = None, *, depth: int = 2, rate: float = 1e-2, seed: int = SEED, **options: Any
) -> TorchLearner:
    model = model or tiny_llama()
    with ONE_AT_A_TIME:
        heads = MTPHeads(model, depth, seed)
    training = MTPTraining(heads, model, learning_rate=rate, dtype=options.get("dtype", "float32"))
    return learner(model, options.pop("objective", None), mtp=training, **options)


def heads_of(trainer: TorchLearner) -> dict[str, Tensor]:
    assert trainer._mtp is not None
    return weights(trainer._mtp.heads)


def head_gradients(trainer: TorchLearner) -> dict[str, Tensor]:
    assert trainer._mtp is not None
    return {name: p.grad.clone() for name, p in trainer._mtp.parameters.items() if p.grad is not None}


def without_heads(result: StepResult) -> StepResult:
    return replace(result, stats={n: v for n, v in result.stats.items() if not n.startswith("mtp/")})


# ---------------------------------------------------------------- the policy never notices
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16"},
        {"value": {"backbone": "shared"}},
        {"value": {"backbone": "copied", "warmup_steps": 1}},
    ],
)
def test_policy_and_stats_keep_their_bits_beside_heads(options: dict[str, Any]) -> None:
    one, other = (tiny_llama(dtype=torch.float32) for _ in range(2))
    plain, beside = learner(one, **dict(options)), with_heads(other, **dict(options))
    for seed in range(3):
        rows = ragged_rows(seed=seed)
        assert without_heads(update(beside, rows)) == update(plain, rows)
    assert_equal_bits(weights(one), weights(other))


def test_the_base_and_the_adapter_keep_their_bits_beside_heads(tmp_path: Path) -> None:
    models = [tiny_llama(dtype=torch.float32) for _ in range(2)]
    for model in models:
        add_adapter(Policy(model, TOKENIZER, frozenset({2}), 64, model.device), LoraAdapter(rank=2), seed=0)
    plain, beside = learner(models[0]), with_heads(models[1])
    before = heads_of(beside)
    for seed in range(2):
        update(plain, ragged_rows(seed=seed))
        update(beside, ragged_rows(seed=seed))
    assert_equal_bits(weights(models[0]), weights(models[1]))
    assert not torch.equal(before["blocks.0.qkv.weight"], heads_of(beside)["blocks.0.qkv.weight"])
    assert set(files_of(beside, tmp_path / "b")) - set(files_of(plain, tmp_path / "p")) == MTP_FILES


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_heads_that_are_not_finite_cost_the_policy_nothing(poison: float) -> None:
    one, other = tiny_llama(), tiny_llama()
    plain, beside = learner(one), with_heads(other)
    assert beside._mtp is not None
    beside._mtp.parameters["blocks.0.combine.weight"].data[0, 0] = poison
    before = heads_of(beside)
    assert update(beside, ragged_rows()).applied == update(plain, ragged_rows()).applied is True
    assert_equal_bits(weights(one), weights(other))
    assert torch.equal(heads_of(beside)["blocks.1.down.weight"], before["blocks.1.down.weight"])


def test_a_skipped_step_leaves_the_heads_alone() -> None:
    trainer = with_heads()
    before = heads_of(trainer)
    assert not update(trainer, ragged_rows(advantage=math.nan)).applied
    assert_equal_bits(before, heads_of(trainer))


# ---------------------------------------------------------------- the gradient
def plain_losses(trainer: TorchLearner, rows: Sequence[TrainRow], temperature: float) -> list[Tensor]:
    """Mean cross entropy of each depth over trained tokens, by whole logits and one row at a time."""
    assert trainer._mtp is not None
    heads, model = trainer._mtp.heads, trainer.model
    sums: list[list[Tensor]] = [[] for _ in range(heads.depth)]
    for row in rows:
        batch = collate([row], device=model.device, packed=False)
        with torch.no_grad():
            hidden_TH = LogprobForward(model, packed=False).features(batch)
        slots = CompletionSlots.of([len(row.completion_ids)], model.device)
        features = heads(hidden_TH, embedded(model, batch.target_N), slots)
        for depth, features_TH in enumerate(features, start=1):
            logprobs_TV = (model.lm_head(features_TH) / temperature).log_softmax(-1)
            for slot in range(len(row.completion_ids) - depth):
                if row.loss_mask is None or row.loss_mask[slot + depth]:
                    sums[depth - 1].append(-logprobs_TV[slot, row.completion_ids[slot + depth]])
    return [torch.stack(each).sum() / len(sums[0]) for each in sums]


def test_the_gradient_is_that_of_the_mean_cross_entropy_of_each_depth() -> None:
    trainer, rows = with_heads(), ragged_rows(9)
    assert trainer._mtp is not None
    losses = plain_losses(trainer, rows, 0.7)
    expected = torch.autograd.grad(torch.stack(losses).sum(), list(trainer._mtp.parameters.values()))
    trainer.accumulate(rows, global_denominator(rows))
    num_tokens = len([1 for row in rows for trained in (row.loss_mask or [])[1:] if trained])
    found = {name: gradient / num_tokens for name, gradient in head_gradients(trainer).items()}
    assert_close(found, dict(zip(found, expected, strict=True)))
    assert trainer.step().stats["mtp/loss_1"] == pytest.approx(float(losses[0].detach()), rel=1e-9)


def test_the_step_does_not_depend_on_how_the_rows_were_split() -> None:
    rows, found = ragged_rows(8), []
    for parts in ([rows], [[row] for row in reversed(rows)], [rows[:3], rows[3:]]):
        trainer = with_heads(optimizer={"epsilon": 1e-3})
        for part in parts:
            trainer.accumulate(part, global_denominator(rows))
        trainer.step()
        found.append(heads_of(trainer))
    assert_close(found[0], found[1])
    assert_close(found[0], found[2])


@pytest.mark.parametrize("count", [2, 3])
def test_several_ranks_train_the_heads_of_one(count: int) -> None:
    rows = ragged_rows(7)
    alone = with_heads(optimizer={"epsilon": 1e-3})
    stats = update(alone, rows).stats

    def train(ranks: ThreadRanks) -> tuple[dict[str, Tensor], dict[str, float]]:
        trainer = with_heads(optimizer={"epsilon": 1e-3}, communicator=ranks)
        own = [] if ranks.rank == 1 else rows[ranks.rank // 2 :: count - 1]
        trainer.accumulate(own, global_denominator(rows))
        found = trainer.step().stats
        return heads_of(trainer), found

    for heads, found in on_ranks(count, train):
        assert_close(heads, heads_of(alone))
        for name in ("mtp/loss_1", "mtp/accuracy_2"):
            assert found[name] == pytest.approx(stats[name], rel=1e-9)


def test_the_gradient_of_the_heads_is_clipped_by_its_own_norm() -> None:
    trainer = with_heads(optimizer={"beta1": 0.9})
    assert trainer._mtp is not None
    trainer._mtp.parameters["blocks.1.output_norm.weight"].data.mul_(100)
    update(trainer, ragged_rows(20))
    means = [trainer._optimizer.state[p]["exp_avg"] for p in trainer._mtp.parameters.values()]
    assert math.sqrt(sum(float(mean.square().sum()) for mean in means)) == pytest.approx(0.1, rel=1e-9)


def test_rows_without_a_token_after_the_first_teach_nothing_and_leave_no_momentum() -> None:
    trainer = with_heads()
    update(trainer, ragged_rows())
    before = heads_of(trainer)
    for rows in (masked_out(ragged_rows()), [TrainRow([3], [5], rollout_logprobs=[-1.0], ref_logprobs=[-1.0])]):
        stats = update(trainer, rows).stats
        assert not [name for name in stats if name.startswith("mtp/")]
    assert_equal_bits(before, heads_of(trainer))


def test_a_rehearsal_leaves_the_heads_without_gradient() -> None:
    trainer = with_heads()
    trainer.accumulate(ragged_rows(), 1.0, rehearsal=True)
    assert head_gradients(trainer) == {}
    assert not [name for name in trainer.gradients() if "block" in name]


def test_heads_learn_of_models_whose_logits_are_not_those_of_the_head_alone() -> None:
    trainer = with_heads(gemma2().float(), objective=SupervisedObjective())
    rows = [TrainRow([3, 4], [5, 6, 7, 8, 9])] * 2
    losses = [update(trainer, rows).stats["mtp/loss_2"] for _ in range(8)]
    assert losses[-1] < losses[0]


# ---------------------------------------------------------------- learning
def test_heads_learn_what_follows_and_say_so() -> None:
    model = tiny_llama(dtype=torch.float32)
    trainer = with_heads(model, objective=SupervisedObjective(), depth=3, memory={"max_micro_batch_tokens": 1000})
    rows = [TrainRow([2], [(start + 3 * place) % 23 for place in range(9)]) for start in range(23)]
    for _ in range(25):
        stats = update(trainer, rows).stats
    assert all(stats[f"mtp/accuracy_{depth}"] > 0.95 for depth in (1, 2, 3))
    assert all(stats[f"mtp/loss_{depth}"] < 0.5 for depth in (1, 2, 3))
    assert {info(name).group for name in stats if name.startswith("mtp/")} == {"mtp"}


# ---------------------------------------------------------------- checkpoints
def files_of(trainer: TorchLearner, folder: Path) -> dict[str, bytes]:
    trainer.save(folder)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_saving_and_continuing_equals_training_through_bit_for_bit(tmp_path: Path) -> None:
    through, first, second = (with_heads(tiny_llama(dtype=torch.float32), seed=seed) for seed in (0, 0, 9))
    for trainer, steps in ((through, range(5)), (first, range(3))):
        for seed in steps:
            update(trainer, ragged_rows(seed=seed))
    first.save(tmp_path / "half")
    second.load(tmp_path / "half")
    for seed in range(3, 5):
        update(second, ragged_rows(seed=seed))
    expected, found = files_of(through, tmp_path / "a"), files_of(second, tmp_path / "b")
    assert expected.keys() > MTP_FILES
    assert [name for name in expected if expected[name] != found[name]] == []


def test_a_rollback_takes_the_heads_back_too(tmp_path: Path) -> None:
    trainer = with_heads()
    update(trainer, ragged_rows())
    good = files_of(trainer, tmp_path / "good")
    update(trainer, ragged_rows(seed=1))
    trainer.roll_back(tmp_path / "good", 0.5)
    now = files_of(trainer, tmp_path / "now")
    assert [name for name in good if good[name] != now[name]] == ["learner.json"]


def test_a_fork_of_a_run_without_heads_begins_with_fresh_ones(tmp_path: Path) -> None:
    origin = learner(tiny_llama())
    update(origin, ragged_rows())
    origin.save(tmp_path)
    trainer = with_heads(tiny_llama(seed=4))
    before = heads_of(trainer)
    trainer.load(tmp_path)
    assert_equal_bits(before, heads_of(trainer))
    assert_equal_bits(weights(origin.model), weights(trainer.model))


@pytest.mark.parametrize(("saved", "wanted"), [(1, 2), (2, 1)])
def test_a_fork_of_another_depth_keeps_the_blocks_that_both_have(tmp_path: Path, saved: int, wanted: int) -> None:
    origin = with_heads(depth=saved)
    update(origin, ragged_rows())
    origin.save(tmp_path)
    trainer = with_heads(tiny_llama(seed=4), depth=wanted, seed=77)
    fresh, kept = heads_of(trainer), heads_of(origin)
    trainer.load(tmp_path)
    now = heads_of(trainer)
    for name in now:
        assert torch.equal(now[name], kept[name] if name in kept else fresh[name]), name
    assert update(trainer, ragged_rows()).applied


def test_heads_of_another_model_change_nothing(tmp_path: Path) -> None:
    trainer = with_heads()
    trainer.save(tmp_path)
    tensors = load_file(tmp_path / "mtp" / "mtp.safetensors")
    save_file(tensors | {"blocks.0.down.weight": torch.zeros(2, 2)}, tmp_path / "mtp" / "mtp.safetensors")
    before = weights(trainer.model)
    with pytest.raises(CheckpointInvalid, match=r"blocks\.0\.down\.weight"):
        trainer.load(tmp_path)
    assert_equal_bits(before, weights(trainer.model))
