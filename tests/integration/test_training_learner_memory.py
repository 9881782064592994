"""Out of memory: half the tokens, the same gradient, the limit kept. Memory is a fake that counts a pass's tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from grpo_engine.errors import OutOfMemory
from grpo_engine.inference.values import CriticScorer
from grpo_engine.model.value import ValueModel
from grpo_engine.training.learner import TorchLearner
from grpo_engine.training.step_totals import forget_peak, memory_stats
from grpo_engine.types import StepResult, TrainRow, global_denominator
from tests.unit.training_fixtures import (
    ThreadRanks,
    assert_close,
    assert_equal_bits,
    learner,
    on_ranks,
    ragged_rows,
    tiny_llama,
    update,
)

MESSAGES = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: out of memory"),
]
ROWS = ragged_rows(16)


class _FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, error: Exception) -> Tensor:
        ctx.error = error
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        raise ctx.error


def small_memory(
    model: LlamaForCausalLM, tokens: int, where: str = "forward", error: Exception = MESSAGES[0]
) -> list[int]:
    """Let the model's backbone fail above `tokens`; the list has the tokens of every pass tried."""
    tried: list[int] = []

    def look(_: object, __: object, output: Any) -> Any:
        hidden = output.last_hidden_state
        tried.append(hidden.shape[0] * hidden.shape[1])
        if tried[-1] > tokens and where == "forward":
            raise error
        if tried[-1] > tokens and hidden.requires_grad:
            output.last_hidden_state = _FailsBackward.apply(hidden, error)
        return output

    model.model.register_forward_hook(look)
    return tried


def gradient(trainer: TorchLearner, calls: Sequence[Sequence[TrainRow]]) -> tuple[dict[str, Tensor], StepResult]:
    denominator = global_denominator([row for rows in calls for row in rows])
    for rows in calls:
        trainer.accumulate(rows, denominator)
    found = {name: gradient.clone() for name, gradient in trainer.gradients().items()}
    return found, trainer.step()


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("error", MESSAGES)
def test_the_step_is_repeated_with_half_the_tokens_and_the_same_gradient(where: str, error: Exception) -> None:
    model, calls = tiny_llama(), [ROWS[:3], ROWS[3:]]  # the second call runs out, after the first fitted
    trainer = learner(model, memory={"max_micro_batch_tokens": 64})
    tried = small_memory(model, 35, where, error)
    found, result = gradient(trainer, calls)
    limit = trainer.max_micro_batch_tokens
    assert max(tried) > 35 >= limit
    unlimited, expected = gradient(learner(tiny_llama(), memory={"max_micro_batch_tokens": 1000}), calls)
    assert_close(found, unlimited, 1e-9)
    tokens = {"memory/micro_batch_tokens": float(limit)}
    assert result.stats == pytest.approx(expected.stats | tokens, rel=1e-9)
    from_the_start, same = gradient(learner(tiny_llama(), memory={"max_micro_batch_tokens": limit}), calls)
    assert_equal_bits(found, from_the_start)
    assert result == same


def test_float32_gradients_stay_within_a_millionth() -> None:
    found = []
    for tokens in (25, 1000):
        model = tiny_llama(dtype=torch.float32)
        trainer = learner(model, memory={"max_micro_batch_tokens": 64})
        small_memory(model, tokens)
        found.append(gradient(trainer, [ROWS])[0])
    assert_close(found[0], found[1], 1e-6)


@pytest.mark.parametrize("backbone", ["copied", "shared"])
def test_a_critic_that_runs_out_repeats_the_policys_pass_too(backbone: str) -> None:
    value = {"backbone": backbone}
    trainer = learner(tiny_llama(), value=value, memory={"max_micro_batch_tokens": 64})
    assert trainer.value is not None
    small_memory(trainer.value.model, 35)
    found, result = gradient(trainer, [ROWS[:3], ROWS[3:]])
    limit = {"max_micro_batch_tokens": trainer.max_micro_batch_tokens}
    expected, same = gradient(learner(tiny_llama(), value=value, memory=limit), [ROWS[:3], ROWS[3:]])
    assert_equal_bits(found, expected)
    assert result == same


def test_the_limit_is_told_once_kept_and_saved(tmp_path: Path) -> None:
    model = tiny_llama()
    trainer = learner(model, memory={"max_micro_batch_tokens": 64})
    tried = small_memory(model, 35)
    update(trainer, ROWS)
    (notice,) = trainer.take_notices()
    assert "ran out of memory: passes have at most" in notice
    assert trainer.take_notices() == []
    tried.clear()
    update(trainer, ROWS)
    assert max(tried) <= 35
    trainer.save(tmp_path)
    limit = json.loads((tmp_path / "learner.json").read_text())["max_micro_batch_tokens"]
    resumed = learner(tiny_llama(), memory={"max_micro_batch_tokens": 64})
    resumed.load(tmp_path)
    assert resumed.max_micro_batch_tokens == trainer.max_micro_batch_tokens == limit < 64


@pytest.mark.parametrize("freeze_old", [False, True])
def test_a_single_row_that_does_not_fit_ends_the_run_with_a_remedy(freeze_old: bool) -> None:
    model = tiny_llama()
    trainer = learner(model, freeze_old=freeze_old)
    small_memory(model, 8)
    rows = [TrainRow([4], list(range(2, 12)), rollout_logprobs=[-2.0] * 10, ref_logprobs=[-2.0] * 10)]
    with pytest.raises(OutOfMemory, match=r"one row of 10 tokens does not fit .* lower\s+sampling.max_new_tokens"):
        trainer.accumulate(trainer.prepare(rows), 10.0)


def test_preparing_and_scoring_halve_likewise() -> None:
    model = tiny_llama()
    trainer = learner(model, freeze_old=True, memory={"max_micro_batch_tokens": 64})
    expected = learner(tiny_llama(), memory={"max_micro_batch_tokens": 1000}).logprobs(ROWS)
    tried = small_memory(model, 35)
    assert trainer.logprobs(ROWS) == [pytest.approx(row, rel=1e-9) for row in expected]
    assert max(tried) > 35 >= trainer.max_micro_batch_tokens
    critic = ValueModel(tiny_llama(), "copied", "float32")
    torch.nn.init.ones_(critic.head.weight)
    whole = CriticScorer(critic, max_micro_batch_tokens=1000).values(ROWS)
    tried = small_memory(critic.model, 35)
    scored = CriticScorer(critic, max_micro_batch_tokens=64).values(ROWS)
    assert scored == [pytest.approx(row, rel=1e-9) for row in whole]
    assert max(tried) > 35 >= tried[-1]


def test_peaks_are_those_of_the_step_and_told_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    resets: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 40)
    cuda = torch.device("cuda")
    found = memory_stats(cuda, 64)
    assert found.pop("memory/fragmentation_share") == 0.25
    assert found == {"memory/micro_batch_tokens": 64, "memory/allocated_bytes": 30, "memory/reserved_bytes": 40}
    monkeypatch.setattr("grpo_engine.training.micro_batching.forget_peak", lambda _: forget_peak(cuda))
    trainer = learner(tiny_llama())
    for part in (ROWS[:3], ROWS[3:]):
        trainer.accumulate(part, 9.0)
    assert resets == [cuda]
    trainer.step()
    update(trainer, ROWS)
    assert resets == [cuda, cuda]


def test_other_errors_pass_through() -> None:
    model = tiny_llama()
    trainer = learner(model)
    small_memory(model, 8, error=RuntimeError("shapes differ"))
    with pytest.raises(RuntimeError, match="shapes differ"):
        trainer.accumulate(ROWS, 1.0)


def test_ranks_take_over_the_lowest_limit() -> None:
    def work(ranks: ThreadRanks) -> tuple[int, int]:
        model = tiny_llama()
        trainer = learner(model, communicator=ranks, memory={"max_micro_batch_tokens": 64})
        small_memory(model, 35 if ranks.rank == 1 else 1000)
        trainer.accumulate(ROWS, 9.0)
        trainer.step()
        return trainer.max_micro_batch_tokens, len(trainer.take_notices())

    (first, notices), second = on_ranks(2, work)
    assert first <= 35
    assert (first, notices) == second == (first, 1)
