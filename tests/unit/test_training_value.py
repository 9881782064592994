from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM

from grpo_engine.communicator import SingleRank
from grpo_engine.config_training import ClipLoss, KLConfig, MemoryConfig, OptimizerConfig, ValueConfig
from grpo_engine.inference.values import CriticScorer
from grpo_engine.model.value import ValueModel
from grpo_engine.training.learner import TorchLearner
from grpo_engine.types import TrainRow, global_denominator
from tests.unit.training_fixtures import (
    POLICY,
    assert_close,
    assert_equal_bits,
    gradients,
    learner,
    ragged_rows,
    tiny_llama,
    update,
    weights,
)

ROWS = ragged_rows(8)
NO_POLICY = replace(POLICY, kl=KLConfig(weight=0.0, track=False), loss=ClipLoss())
"""With advantage 0 the policy has no loss of its own."""


def with_critic(backbone: str = "copied", *, head: float | None = 0.3, **options: Any) -> TorchLearner:
    """A learner with a critic whose head is not zero, so that its values and gradients are not either."""
    config = {"backbone": backbone} | options.pop("value", {})
    trainer = learner(tiny_llama(), options.pop("objective", None), value=config, **options)
    if head is not None and trainer.value is not None:
        torch.nn.init.constant_(trainer.value.head.weight, head)
    return trainer


def naive_values(model: torch.nn.Module, head: torch.nn.Linear, row: TrainRow) -> Tensor:
    """[T] row by row, without packing: from the hidden state before each completion token."""
    ids = torch.tensor([row.prompt_ids + row.completion_ids])
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0]  # type: ignore[operator, union-attr]
    start = len(row.prompt_ids) - 1
    values: Tensor = head(hidden[start : start + len(row.completion_ids)]).squeeze(1)
    return values


@pytest.mark.parametrize("backbone", ["copied", "shared"])
def test_values_are_read_before_each_token_whatever_the_packing(backbone: str) -> None:
    model = tiny_llama()
    critic = ValueModel(model, backbone, "float32")  # type: ignore[arg-type]
    torch.nn.init.normal_(critic.head.weight)
    torch.nn.init.constant_(critic.head.bias, 0.5)
    expected = [naive_values(model, critic.head, row).tolist() for row in ROWS]
    for limit in (1, 20, 1000):
        found = CriticScorer(critic, max_micro_batch_tokens=limit).values(ROWS)
        assert found == [pytest.approx(row, abs=1e-6) for row in expected]
    assert CriticScorer(critic, max_micro_batch_tokens=9).values([]) == []


def test_a_new_critic_values_everything_at_zero() -> None:
    critic = ValueModel(tiny_llama(), "copied", "float32")
    assert {value for row in CriticScorer(critic, max_micro_batch_tokens=50).values(ROWS) for value in row} == {0.0}


def test_the_copy_is_trained_and_the_policy_is_not_pulled() -> None:
    rows = [replace(row, advantage=0.0) for row in ROWS]
    trainer = with_critic(objective=NO_POLICY)
    policy, critic = weights(trainer.model), weights(trainer.value or torch.nn.Module())
    result = update(trainer, rows)
    assert_equal_bits(policy, weights(trainer.model))
    after = weights(trainer.value or torch.nn.Module())
    assert [name for name in critic if torch.equal(critic[name], after[name])] == []
    assert result.gradient_norm == 0
    assert result.stats["value/gradient_norm"] > 0.01


def expected_gradient(model: torch.nn.Module, head: torch.nn.Linear, rows: Sequence[TrainRow], weight: float) -> None:
    """Backward of the plain squared error, token mean: what value_sums means without a clip."""
    errors = [
        (value - target).square() / 2
        for row in rows
        for value, target, counts in zip(
            naive_values(model, head, row), row.returns or [], row.loss_mask or [], strict=True
        )
        if counts
    ]
    (weight * torch.stack(errors).sum() / len(errors)).backward()


@pytest.mark.parametrize("weight", [0.5, 2.0])
def test_the_shared_critic_pulls_at_the_policy_by_its_weight(weight: float) -> None:
    rows = [replace(row, advantage=0.0) for row in ROWS]
    trainer = with_critic("shared", objective=NO_POLICY, value={"loss_weight": weight, "clip": None})
    assert trainer.value is not None
    trainer.accumulate(rows, global_denominator(rows))
    found = {name: gradient for name, gradient in trainer.gradients().items() if "lm_head" not in name}
    model, head = tiny_llama(), torch.nn.Linear(16, 1, dtype=torch.float64)
    head.load_state_dict(trainer.value.head.state_dict())
    expected_gradient(model, head, rows, weight)
    expected = gradients(model) | {f"value.head.{name}": g for name, g in gradients(head).items()}
    assert_close(found, expected, 1e-6)  # Llama's norms compute in float32


@pytest.mark.parametrize("backbone", ["copied", "shared"])
def test_warm_up_trains_the_critic_alone_and_leaves_the_policys_optimizer_still(backbone: str) -> None:
    trainer = with_critic(backbone, value={"warmup_steps": 2}, optimizer={"weight_decay": 0.1})
    before = weights(trainer.model)
    losses = [update(trainer, ROWS) for _ in range(2)]
    assert_equal_bits(before, weights(trainer.model))
    assert not any(p in trainer._optimizer.state for p in trainer.model.parameters())
    assert losses[1].stats["value/loss"] < losses[0].stats["value/loss"]
    assert losses[0].gradient_norm == 0
    assert losses[0].stats["loss"] == pytest.approx(0.5 * losses[0].stats["value/loss"])
    assert "policy/entropy" in losses[0].stats
    assert update(trainer, ROWS).gradient_norm > 0
    assert not torch.equal(before["lm_head.weight"], trainer.model.lm_head.weight)


def test_the_critic_learns_what_the_returns_are() -> None:
    rows = [replace(row, returns=[float(len(row.prompt_ids))] * len(row.completion_ids)) for row in ROWS]
    trainer = with_critic(head=None, value={"learning_rate": 3e-2, "clip": None, "warmup_steps": 40}, num_steps=40)
    explained = [update(trainer, rows).stats["value/explained_variance"] for _ in range(40)]
    assert explained[0] == pytest.approx(0.0, abs=1e-9)
    assert explained[-1] > 0.9


def test_the_critic_has_its_own_rate_and_clip_and_follows_the_schedule() -> None:
    options = {"schedule": "linear", "warmup_steps": 2, "learning_rate": 1e-2, "max_gradient_norm": 1e-3}
    trainer = with_critic(value={"learning_rate": 1e-3}, optimizer=options, num_steps=4)
    rates = []
    for _ in range(4):
        update(trainer, ROWS)
        rates.append({group["part"]: group["lr"] for group in trainer._optimizer.param_groups})
    assert [rate["policy"] for rate in rates] == pytest.approx([5e-3, 1e-2, 5e-3, 0.0])
    assert [rate["value"] for rate in rates] == pytest.approx([5e-4, 1e-3, 5e-4, 0.0])


def test_each_part_is_clipped_by_its_own_norm() -> None:
    trainer = with_critic(optimizer={"max_gradient_norm": 1e-3, "beta1": 0.0})
    update(trainer, ROWS)
    for parameters in (trainer._policy.values(), trainer._critic.values()):
        moments = [trainer._optimizer.state[p]["exp_avg"] for p in parameters]
        assert sum(float(m.square().sum()) for m in moments) ** 0.5 == pytest.approx(1e-3, rel=1e-6)


def test_the_copy_shares_the_output_head_and_nothing_that_is_trained() -> None:
    model = tiny_llama()
    critic = ValueModel(model, "copied", "float32")
    own = {p.data_ptr() for p in critic.parameters()}
    assert own.isdisjoint(p.data_ptr() for p in model.parameters())
    assert critic.model.lm_head.weight is model.lm_head.weight
    assert {name.partition(".")[0] for name, _ in critic.named_parameters()} == {"backbone", "head"}
    assert dict(ValueModel(model, "shared", "float32").named_parameters()).keys() == {"head.weight", "head.bias"}


def test_bfloat16_masters_stay_float32_and_the_head_computes_in_it() -> None:
    trainer = learner(tiny_llama(dtype=torch.float32), dtype="bfloat16", value={})
    assert trainer.value is not None
    assert update(trainer, ROWS).applied
    assert {p.dtype for p in trainer.value.parameters()} == {torch.float32}


@pytest.mark.parametrize("warmup", [0, 1])
def test_a_shared_critic_on_a_model_that_caps_its_logits_reads_the_hidden_states_itself(warmup: int) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 23}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = Gemma2ForCausalLM(Gemma2Config(**sizes, **heads, final_logit_softcapping=2.0, eos_token_id=1))
    critic = ValueModel(model, "shared", "float32")
    torch.nn.init.ones_(critic.head.weight)
    config = ValueConfig(backbone="shared", warmup_steps=warmup)
    trainer = TorchLearner(
        model, OptimizerConfig(), num_steps=2, objective=NO_POLICY, memory=MemoryConfig(), dtype="float32",
        pad_token_id=0, communicator=SingleRank(), value=critic, value_config=config,
    )  # fmt: skip
    result = update(trainer, [replace(row, advantage=0.0) for row in ROWS])
    assert (result.gradient_norm > 0) == (warmup == 0)
    assert result.stats["value/gradient_norm"] > 0
